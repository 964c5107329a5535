"""examples/lm/processes.py: many processes of a run, without JAX where it can be."""

import os
import signal
import subprocess
import sys

import jax
import pytest
import two_processes  # puts examples/ on the path
from jax.experimental import multihost_utils

from lm import processes  # isort: skip
from lm.errors import RunError, UserError

EXAMPLES = str(two_processes.ROOT / "examples")


@pytest.mark.parametrize(
    "error, kind, said",
    [
        (UserError("no such flag"), UserError, "no such flag"),
        (RunError("lost"), RunError, "lost"),
        (OSError(30, "Read-only file system", "/x"), RunError, "Read-only file system"),
        (UserError("层" * 5000), UserError, "层" * 600),  # cut, to be sent at all
    ],
)
def test_what_process_0_cannot_do_no_process_does(error, kind, said, monkeypatch):
    """One that waited for an answer would wait for ever."""
    sent = []

    def broadcast(message):
        sent.append(message)
        return message

    def find():
        raise error

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    with pytest.raises(kind) as caught:
        processes.agree(find)
    assert said in str(caught.value) and sent[0].shape == (4096,)
    assert processes.agree(lambda: 8) == 8


def launched(code: str) -> subprocess.Popen:
    """`start_local` of two processes that run `code`, which knows its number."""
    code = "import os, signal, sys, time\nnumber = int(sys.argv[-1][-1])\n" + code
    launcher = (
        "import argparse, sys\n"
        "from lm import processes\n"
        f"command = [sys.executable, '-c', {code!r}]\n"
        "args = argparse.Namespace(processes=2)\n"
        "sys.exit(processes.start_local(args, command))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", launcher],
        env=os.environ | {"PYTHONPATH": EXAMPLES},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_is_killed_is_told_of_and_ends_the_others():
    code = (
        "if number == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(0.5)\n"
        "sys.exit(1)"
    )
    launcher = launched(code)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "process 1 was ended by SIGKILL" in stderr and "--resume" in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_to_process_0_as_sigterm(number):
    code = (
        "def save(number, frame):\n"
        "    print('saved', number, flush=True)\n"
        "    sys.exit(128 + number)\n"
        "if number == 0:\n"
        "    signal.signal(signal.SIGTERM, save)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "time.sleep(1)"
    )
    launcher = launched(code)
    assert launcher.stdout.readline() == "ready\n"
    launcher.send_signal(number)
    stdout, _ = launcher.communicate(timeout=60)
    assert stdout == f"saved {int(signal.SIGTERM)}\n"
    assert launcher.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "raised, status, said",
    [
        ("OSError(28, 'No space left on device')", 1, "No space left on device"),
        ("RuntimeError('Connection reset by peer')", 1, "Traceback"),
        ("UserError('token 300 is outside')", 2, "error: token 300 is outside"),
    ],
)
def test_one_process_that_fails_does_not_wait_for_the_others(raised, status, said):
    """Seen: five minutes in JAX's barrier at exit, the others in a collective."""
    code = (
        "import atexit, time\n"
        "import train_lm\n"
        "from lm.errors import UserError\n"
        "atexit.register(time.sleep, 60)\n"
        f"def fail(*args): raise {raised}\n"
        "train_lm.processes.join, train_lm.train = lambda args: None, fail\n"
        "flags = ['--distributed', '--data', train_lm.__file__]\n"
        "train_lm.sys.exit(train_lm.main(flags))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": EXAMPLES},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == status and said in done.stderr, done.stderr


def test_freed_memory_is_kept_where_there_is_glibc(monkeypatch):
    """What mallopt is told, by the numbers of malloc.h; elsewhere nothing happens."""
    told = []

    class Library:
        def mallopt(self, parameter, value):
            told.append((parameter, value))
            return 1

    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: Library())
    assert processes.keep_freed_memory()
    assert told == [(-4, 0), (-1, 2**31 - 1), (-8, 1)]
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: object())
    assert not processes.keep_freed_memory()
