"""A database of MLflow, an `mlflow server` for it on loopback, and a tiny policy: each made once per session."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from model_registry.connection import connect
from model_registry.tracking import Tracker

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
# Makes a random Llama in a separate process, to keep torch out of the process of the tests.
MAKE_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=int(sys.argv[2]), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                     bos_token_id=None, eos_token_id=0, pad_token_id=0, dtype="bfloat16")
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1], max_shard_size="20KB")
"""


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow with all its tables; making one takes seconds."""
    path = tmp_path_factory.mktemp("migrated") / "mlflow.db"
    connect(f"sqlite:///{path}")
    return path


@pytest.fixture
def home(tmp_path: Path, migrated_database: Path) -> Path:
    """A home of Pedigree with an empty database and a space in its name."""
    folder = tmp_path / "my home"
    (folder / "mlflow").mkdir(parents=True)
    shutil.copy(migrated_database, folder / "mlflow" / "mlflow.db")
    return folder


@pytest.fixture
def uri(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow' / 'mlflow.db'}"


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def tracker(home: Path, uri: str, warnings: list[str]) -> Tracker:
    return Tracker(uri, home / "mlflow" / "artifacts", warnings.append)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy as written by training: a tiny random Llama in several bfloat16 shards, with tokenizer and settings."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=320, special_tokens=SPECIAL_TOKENS, initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator(["a better answer is short and true", "tell me the time of day"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "training.json").write_text("{}")
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(folder), str(tokenizer.get_vocab_size())], check=True)
    return folder


class Server:
    """An `mlflow server` on loopback; database and artifacts survive its crash."""

    def __init__(self, folder: Path, database: Path) -> None:
        shutil.copy(database, folder / "mlflow.db")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder, self.artifacts = folder, folder / "artifacts"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder / 'mlflow.db'}"]
        command += ["--artifacts-destination", str(self.artifacts)]
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # unused workers
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_plain_signals,
            )
        self._await_health(time.monotonic() + 120)

    def kill(self) -> None:
        """Kill it and its workers at once, as a crash of the machine would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _await_health(self, deadline: float) -> None:
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"no server: {(self._folder / 'server.log').read_text()[-2000:]}")
                time.sleep(0.1)


def _plain_signals() -> None:
    """Reset signals: a background process ignores SIGINT, and then the server ignores SIGTERM too."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path):
    """A running server for the session. A test that kills it starts it again."""
    server = Server(tmp_path_factory.mktemp("server"), migrated_database)
    server.start()
    yield server
    server.kill()
