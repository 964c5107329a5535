"""One run by many processes: joining them, agreeing on what process 0 found."""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np

from lm.errors import RunError, UserError


def emulate(devices: int) -> None:
    """Makes the CPU platform look like `devices` devices; call before importing jax.

    A GPU or TPU machine is not affected. An XLA_FLAGS that already says a number wins.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={devices}".strip()
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Has glibc keep what a step frees for the next one; False where there is no glibc.

    XLA frees its buffers on the CPU at every step. By default large ones go back to the
    kernel, and a third of a step of a small model is spent on getting them again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Of malloc.h: never by mmap, never trimmed, from one arena.
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8
    wanted = ((m_mmap_max, 0), (m_trim_threshold, 2**31 - 1), (m_arena_max, 1))
    return all([mallopt(parameter, value) for parameter, value in wanted])


def join(args: argparse.Namespace) -> None:
    """Calls jax.distributed.initialize if this is one process of many."""
    import jax

    if not args.distributed:
        return
    # Only read where the platform is CPU: there, collectives go through gloo.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            args.coordinator, args.num_processes, args.process_id
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"--distributed: the processes could not be joined ({reason}); off a TPU "
            f"pod or cluster give --coordinator, --num-processes and --process-id, or "
            f"use --processes N on one machine"
        ) from None


@contextlib.contextmanager
def alike():
    """What goes wrong inside goes wrong on every process: process 0 alone tells it."""
    import jax

    try:
        yield
    except (UserError, RunError) as error:
        error.shared, error.told = True, jax.process_index() > 0
        raise


def leave(status: int, error: Exception) -> None:
    """Ends this process at once where `error` is its own: the others do not know of it.

    At its exit JAX would wait for them, minutes long, and they for it in a collective.
    """
    if not getattr(error, "shared", False):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def agree(find):
    """What `find()` returns on process 0, on every process; its error on every one.

    `find` runs on process 0 alone and returns something that JSON can hold. To be
    called inside `alike`.
    """
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return find()
    said = np.zeros(4096, np.uint8)
    if jax.process_index() == 0:
        try:
            answer = {"value": find()}
        except (UserError, RunError, OSError) as error:
            # At most six bytes a character, where it is not ASCII.
            answer = {"error": str(error)[:600], "user": isinstance(error, UserError)}
        text = json.dumps(answer).encode()
        said[: len(text)] = np.frombuffer(text, np.uint8)
    said = multihost_utils.broadcast_one_to_all(said)
    answer = json.loads(bytes(np.asarray(said)).rstrip(b"\0"))
    if "error" in answer:
        raise (UserError if answer["user"] else RunError)(answer["error"])
    return answer["value"]


def start_local(args: argparse.Namespace, command: list[str]) -> int:
    """Runs `command` as args.processes joined processes on this machine.

    Process 0 writes to this terminal, the others only their errors. SIGTERM and Ctrl-C
    are handed on, so that the run saves first. Returns process 0's exit status, or that
    of the first one to fail: the others are then stopped. One that a signal killed is
    told of, and has the status of a shell: 128 and the signal's number.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    joined = ["--distributed", f"--coordinator=127.0.0.1:{port}"]
    joined += [f"--num-processes={args.processes}"]
    running = [
        subprocess.Popen(
            [*command, "--processes=1", *joined, f"--process-id={i}"],
            stdout=None if i == 0 else subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches them once, through us
        )
        for i in range(args.processes)
    ]

    def hand_on(number, frame):
        # JAX's preemption service listens for SIGTERM, and tells every process.
        running[0].send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    try:
        while all(process.poll() is None for process in running):
            time.sleep(0.1)
        failed = [_status(i, p) for i, p in enumerate(running) if p.poll()]
        deadline = time.monotonic() + (20 if failed else 600)
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
        return failed[0] if failed else _status(0, running[0])
    except subprocess.TimeoutExpired:
        return failed[0] if failed else 1
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def _status(number: int, process: subprocess.Popen) -> int:
    """The exit status of one that has ended."""
    if process.returncode >= 0:
        return process.returncode
    name = signal.Signals(-process.returncode).name
    sys.stderr.write(
        f"train_lm.py: process {number} was ended by {name}, and with it the run: go "
        f"on with --resume\n"
    )
    return 128 - process.returncode
