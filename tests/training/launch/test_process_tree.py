"""The processes below another one, compared with /proc, and their end. Programs of the test's own adopt orphans."""

import os
import signal
import subprocess
import sys
import time

from tests.training.launch.living import alive, all_gone
from training.launch.process_tree import ancestors, living_siblings, stopped_descendants

# A shell whose child ignores SIGTERM, in a session of its own, and outlives the shell: an orphan. A zombie beside it.
ORPHANS = """
import os, subprocess, sys, time
from training.launch.process_tree import adopt_orphans, end_descendants

adopt_orphans()
stubborn = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
launch = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
zombie = subprocess.Popen([sys.executable, "-c", ""])
subprocess.run([sys.executable, "-c", launch, stubborn])
sys.stdin.readline()
started = time.monotonic()
end_descendants(0.5)
print(time.monotonic() - started, flush=True)
os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
"""
WAITING = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]


def test_end_descendants_orphan_that_ignores_sigterm_is_killed_after_the_grace():
    program = [sys.executable, "-P", "-c", ORPHANS]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as ending:
        assert ending.stdout is not None and ending.stdin is not None and ending.stderr is not None
        orphan = int(ending.stdout.readline())
        assert alive([orphan])
        ending.stdin.write("\n")
        ending.stdin.flush()
        seconds = float(ending.stdout.readline())
        assert all_gone([orphan]) and 0.5 <= seconds < 30
        assert "ChildProcessError" in ending.stderr.read(), "no child is left, not even a zombie"


def test_stopped_descendants_names_a_stopped_process_only():
    with (
        subprocess.Popen(WAITING, stdout=subprocess.PIPE) as stopped,
        subprocess.Popen(WAITING, stdout=subprocess.PIPE) as other,
    ):
        try:
            for process in (stopped, other):
                assert process.stdout is not None
                process.stdout.readline()
            assert stopped_descendants(os.getpid()) == []
            stopped.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 30
            while not (found := stopped_descendants(os.getpid())) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert found == [stopped.pid]
        finally:
            stopped.kill()
            other.kill()
    assert stopped_descendants(stopped.pid) == [], "a process that has ended has none"


def test_ancestors_begin_with_the_parent_and_end_with_the_first_process():
    found = ancestors()
    assert found[0] == os.getppid() and found[-1] == 1


def test_living_siblings_zombie_does_not_count():
    program = "from training.launch.process_tree import living_siblings; print(living_siblings())"
    counted = "import os, subprocess, sys; [os.fork() or os._exit(0) for _ in range(2)]; subprocess.run(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", counted, sys.executable, "-P", "-c", program], capture_output=True, text=True
    )
    assert done.stdout.split() == ["1"], done.stderr
    assert living_siblings() >= 1
