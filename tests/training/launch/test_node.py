"""What runs on a node, alone and as a process: what it says to orders that it cannot follow on this machine."""

import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from training.contract.protocol.job import Input, Job
from training.launch.node import Order, software

MakeJob = Callable[..., Job]


def order(job: Job) -> Order:
    return Order(
        node=0,
        addresses=("127.0.0.1", "127.0.0.1"),
        port=29400,
        module="plain_program",
        job=job.path,
        sha256=hashlib.sha256(job.path.read_bytes()).hexdigest(),
        software=software(),
        environment={},
    )


def answer(text: str) -> tuple[int, str]:
    """The status, and what is said to one line of standard input, after which that ends."""
    command = [sys.executable, "-P", "-m", "training.launch.node"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_ready_and_then_cancelled(make_job: MakeJob):
    job = make_job("status")
    job.write()
    status, said = answer(order(job).model_dump_json() + "\n")
    assert status == 143  # what a shell gives for SIGTERM
    assert said.startswith("pedigree-node: ready ") and said.endswith(f", lo 127.0.0.1, {sys.executable}\n")


REFUSED, CODE = "pedigree-node: refused ", " [nodes]\n"


def test_a_folder_that_is_not_there_or_not_the_same(make_job: MakeJob, tmp_path: Path):
    job = make_job("status")
    job.write()
    original = order(job)
    moved = original.model_copy(update={"job": tmp_path / "elsewhere" / "job.json"})
    refused(moved, f"{moved.job}: No such file or directory")
    refused(original.model_copy(update={"sha256": "0" * 64}), f"{job.path} is there, but it is not the same")
    without = job.model_copy(
        update={"inputs": {"base_model": Input(kind="base_model", fingerprint="0" * 64, folder=tmp_path / "model")}}
    )
    without.write()
    refused(order(without), str(tmp_path / "model"), "base_model")


def refused(order: Order, *values: str) -> None:
    status, output = answer(order.model_dump_json())
    assert status == 1 and output.startswith(REFUSED) and output.endswith(CODE)
    assert all(value in output for value in ("PEDIGREE_HOME", *values))


def test_other_software(make_job: MakeJob):
    job = make_job("status")
    job.write()
    there = order(job).model_copy(update={"software": {**software(), "torch": "1.0", "apex": "2.0"}})
    status, said = answer(there.model_dump_json())
    assert status == 1 and said.startswith(REFUSED) and said.endswith(CODE)
    values = (f"torch {software()['torch']}, not 1.0", "apex none, not 2.0", sys.executable)
    assert all(value in said for value in values)


def test_nothing_is_started_without_an_order():
    status, said = answer("")
    assert status == 1 and said.startswith(REFUSED) and "standard input" in said


def test_a_signal_is_told(make_job: MakeJob, free_port: Callable[[], int]):
    """Sent to the one node of a job, as a scheduler sends it to all that runs on a machine."""
    job = make_job("answered")  # which goes on until it is answered
    job.write()
    alone = order(job).model_copy(update={"addresses": ("127.0.0.1",), "port": free_port()})
    command = [sys.executable, "-P", "-m", "training.launch.node"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as node:
        assert node.stdin is not None and node.stdout is not None
        node.stdin.write(f"{alone.model_dump_json()}\ngo\n".encode())
        while not node.stdout.readline().startswith(b"pedigree-node: started"):
            assert node.poll() is None
        node.send_signal(signal.SIGTERM)
        assert node.stdout.read().endswith(b"pedigree-node: ended 143\n")
    assert node.returncode == 143
