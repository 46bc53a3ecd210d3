"""A released version behind real servers, used through OpenAI's client, the terminal, and `mlflow models serve`."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from model_registry.files import local_path
from model_registry.registry import Registry
from model_registry.tracking import Tracker
from tests.workflows.homes import PEDIGREE, Home
from workflows.servers.server_processes import free_port

pytestmark = pytest.mark.system
QUESTION: Any = [{"role": "user", "content": "tell me"}]
TOKENS = 12
# The greedy answer of plain transformers, from the policy's folder.
ANSWER = f"""
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
words, model = AutoTokenizer.from_pretrained(sys.argv[1]), AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
ids = words.apply_chat_template({QUESTION}, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
made = model.generate(ids, max_new_tokens={TOKENS}, do_sample=False)[0, ids.shape[1]:]
sys.stdout.buffer.write(words.decode(made, skip_special_tokens=True).encode())
"""


@dataclass(frozen=True)
class Released:
    """A home with a champion of `demo` with random weights, and its greedy answer."""

    home: Home
    uri: str
    answer: str


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path, policy: Path) -> Released:
    """The folder's name has an `@`: in the name of a model it would begin a revision."""
    home = tmp_path_factory.mktemp("me@home")
    (home / "mlflow").mkdir()
    shutil.copy(migrated_database, home / "mlflow" / "mlflow.db")
    uri = f"sqlite:///{home / 'mlflow' / 'mlflow.db'}"
    with Tracker(uri, home / "mlflow" / "artifacts").run(experiment="e", key="a", name="a", params={}, tags={}) as run:
        pass
    registry = Registry(uri, home / "downloads")
    for name, tokenizer in (("demo", policy), ("untemplated", without_template(policy, home / "untemplated"))):
        version = registry.register(
            name, policy, run.run_id, identity={"pedigree.policy": name}, tags={}, tokenizer=tokenizer
        )
        registry.promote(version, over=None)
    done = subprocess.run([sys.executable, "-c", ANSWER, str(policy)], capture_output=True, check=True)
    return Released(Home(home), uri, done.stdout.decode())


def without_template(policy: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(policy / name, target / name)
    return target


@contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a server as a shell does in the background. End it with SIGTERM."""
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_for(process: "subprocess.Popen[bytes]", log: Path, pattern: str) -> "re.Match[str]":
    deadline = time.monotonic() + 300
    while not (found := re.search(pattern, log.read_text())):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def address(released: Released, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `pedigree serve demo`. At the end, all its processes must have ended."""
    log = tmp_path_factory.mktemp("serve") / "serve.log"
    command = [PEDIGREE, "serve", "demo", "--port", str(free_port(0))]
    with running(command, released.home.environment, log) as process:
        yield wait_for(process, log, r"demo, version 1: (\S+)/chat/completions")[1]
        server_log = (released.home.path / "serve" / "transformers.log").read_text()
        ports = re.findall(r"running on http://127\.0\.0\.1:(\d+)", server_log)
    assert process.returncode == 0
    assert ports
    for port in (command[-1], *ports):
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **settings: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=TOKENS, **settings)


def test_serve_lists_the_model_by_its_name(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["demo"]


@pytest.mark.parametrize("greedy", [{}, {"temperature": 0}])
def test_serve_without_temperature_answers_like_plain_transformers(
    client: openai.OpenAI, released: Released, greedy: dict[str, int]
):
    answer = ask(client, **greedy)
    assert (answer.model, answer.object) == ("demo", "chat.completion")
    assert answer.choices[0].message.content == released.answer


def test_serve_with_temperature_samples(client: openai.OpenAI):
    """With random weights, two answers of twelve tokens hardly ever agree."""
    answers = {ask(client, temperature=1.0).choices[0].message.content for _ in range(3)}
    assert len(answers) == 3


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_serve_streams_an_answer(client: openai.OpenAI, released: Released, temperature: float):
    parts = list(ask(client, temperature=temperature, stream=True))
    assert {part.model for part in parts} == {"demo"}
    assert len(parts) > 2 and parts[-1].choices[0].finish_reason in ("length", "stop")
    if not temperature:
        assert "".join(part.choices[0].delta.content or "" for part in parts) == released.answer


def test_serve_refusals_are_errors_of_openais_client(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match=r"'another'.*'demo'"):
        client.chat.completions.create(model="another", messages=QUESTION)
    with pytest.raises(openai.UnprocessableEntityError, match=r"Unexpected fields in the request: .'top_k'."):
        ask(client, extra_body={"top_k": 3})


def test_serve_request_for_another_host_is_refused(address: str):
    request = urllib.request.Request(f"{address}/models", headers={"Host": "page.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=30)


def test_chat_answers_each_line_and_remembers(released: Released):
    """Both questions are the same, so without memory both answers would be."""
    command = [PEDIGREE, "chat", "demo@champion", "--max-tokens", str(TOKENS)]
    questions = f"{QUESTION[0]['content']}\n\n" * 2
    environment = released.home.environment
    done = subprocess.run(
        command, env=environment, input=questions.encode(), capture_output=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr.decode()
    output = done.stdout.decode()
    assert output.startswith(f"{released.answer}\n") and output.endswith("\n")
    assert output != f"{released.answer}\n" * 2


@pytest.mark.parametrize(
    ("model", "exit_code", "values"),
    [
        ("nobody", 2, ("nobody", "[unknown-model]")),
        ("demo@best", 1, ("demo", "best", "[unknown-alias]")),
        ("untemplated", 1, ("version 1 of untemplated", "[missing-chat-template]")),
    ],
)
def test_serve_unusable_model_fails_with_its_name(
    released: Released, model: str, exit_code: int, values: tuple[str, ...]
):
    done = released.home.invoke("serve", model)
    assert done.exit_code == exit_code and all(value in done.output for value in values), done.output


def test_serve_version_without_tokenizer_fails_with_its_name(released: Released, tmp_path: Path):
    home = Home(Path(shutil.copytree(released.home.path, tmp_path / "home")))
    source = Registry(released.uri, tmp_path / "downloads").version_at("models:/untemplated/1").source
    folder = home.path / local_path(source).relative_to(released.home.path)
    for file in (folder / "model").glob("tokenizer*"):
        file.unlink()
    done = home.invoke("serve", "untemplated/1")
    assert done.exit_code == 1 and "version 1 of untemplated" in done.output and "[missing-tokenizer]" in done.output


def test_mlflow_serve_is_greedy_and_returns_one_object(released: Released, tmp_path: Path):
    port, log = free_port(0), tmp_path / "mlflow.log"
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/demo@champion"]
    command += ["--env-manager", "local", "--port", str(port)]
    # MLflow starts uvicorn by its name.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "MLFLOW_TRACKING_URI": released.uri, "HF_HUB_OFFLINE": "1"}
    with running(command, environment, log) as process:
        wait_for(process, log, "startup complete")
        for greedy in ({}, {"temperature": 0}, {"temperature": 0.0, "stream": False}):
            answer = invoke(port, {"messages": QUESTION, "max_tokens": TOKENS, **greedy})
            assert (answer["object"], answer["model"]) == ("chat.completion", "demo")
            assert answer["choices"][0]["message"]["content"] == released.answer
        sampled = {json.dumps(invoke(port, {"messages": QUESTION, "temperature": 1.0})["choices"]) for _ in range(3)}
        assert len(sampled) == 3
        with pytest.raises(urllib.error.HTTPError) as refused:
            invoke(port, {"messages": QUESTION, "stream": True})
        response = json.loads(refused.value.read())
        assert refused.value.code == 400 and "`stream` is True" in response["message"]
        assert "stack_trace" not in response
        example = next(released.home.path.rglob("serving_input_example.json"))
        assert invoke(port, json.loads(example.read_text()))["object"] == "chat.completion"


def invoke(port: int, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)
