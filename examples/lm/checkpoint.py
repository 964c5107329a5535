"""Checkpoints: Orbax writes them in the background, a digest says that they are whole.

    checkpoints/100/          params, optimizer state and step, as Orbax lays them out
    checkpoints/100.sha256    SHA-256 of every file in it, written after its commit

A checkpoint counts only with its digest, and only while every file still has it: Orbax
by itself restores an array whose bits have flipped without a word. Nothing is
unpickled.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import shutil
import threading

import jax
import orbax.checkpoint as ocp

from lm.errors import UserError


def flatten(tree) -> dict[str, jax.Array]:
    """The leaves by path: plain names, so that a checkpoint needs no Python class."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


class CheckpointError(Exception):
    """A checkpoint could not be written; the older ones are as they were."""


class Checkpoints:
    """Saves and restores a pytree of arrays; keeps the newest `keep` that are whole."""

    def __init__(self, folder: pathlib.Path, keep: int):
        self.folder = folder.absolute()
        self.keep = keep
        self._orbax = ocp.StandardCheckpointer()
        self._after: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def save(self, step: int, tree) -> None:
        """Starts writing `tree` as the checkpoint of `step`, after the one before it.

        Training may go on (and donate `tree`) as soon as this returns.

        Raises:
            CheckpointError: this write could not be started, or the one before failed.
        """
        self.wait()
        with _failing(self.folder, step):
            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                _digest_path(self.folder, step).unlink(missing_ok=True)
            self._orbax.save(self.folder / str(step), flatten(tree), force=True)
        self._after = threading.Thread(target=self._finish, args=(step,))
        self._after.start()

    def _finish(self, step: int) -> None:
        """In a thread: after the commit of `step` its digest; then older ones go."""
        try:
            with _failing(self.folder, step):
                self._orbax.wait_until_finished()
                if jax.process_index() == 0:
                    write_digest(self.folder, step)
                    self._remove_older(step)
        except CheckpointError as error:
            self._error = error

    def _remove_older(self, step: int) -> None:
        kept = steps_with_digest(self.folder)[-self.keep :]
        for entry in self.folder.iterdir():
            name = entry.name.removesuffix(".sha256")
            # Only what was named here is removed, and nothing newer than this step.
            if name.isdigit() and int(name) not in kept and int(name) < step:
                _remove(entry)

    def wait(self) -> None:
        """Returns once the newest save and its digest are on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._after is not None:
            self._after.join()
            self._after = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def restore(self, step: int, like):
        """The checkpoint of `step`, with the structure, types and shardings of `like`.

        Waits are as in `like` where the checkpoint has none of their shape: --log-stats
        may come and go from one run to the next, and another mesh may select from
        another axis.

        Raises:
            UserError: the checkpoint holds other arrays than `like`.
        """
        path = self.folder / str(step)
        wanted = flatten(like)
        found = self._orbax.metadata(path).item_metadata.tree
        waits = {
            name
            for name in wanted.keys() | found.keys()
            if name.startswith("waits.") and not _alike(wanted, found, name)
        }
        _compare(path, wanted, found, waits)
        read = {n: _abstract(x) for n, x in wanted.items() if n in found}
        for name in waits & found.keys():  # read, for Orbax reads all, and dropped
            x = found[name]
            read[name] = jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=like.step.sharding
            )
        restored = self._orbax.restore(path, read)
        values = wanted | {n: x for n, x in restored.items() if n not in waits}
        leaves = [values[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def close(self) -> None:
        self._orbax.close()


@contextlib.contextmanager
def _failing(folder: pathlib.Path, step: int):
    """What goes wrong inside becomes a CheckpointError, and what it left is removed."""
    try:
        yield
    except Exception as error:  # Orbax, TensorStore and the OS have no common one
        if jax.process_index() == 0:
            # Other threads may be writing there still.
            with contextlib.suppress(OSError):
                clean(folder)
        # TensorStore names every file on the way; the system's own words are enough.
        reason = " ".join(str(error).split())
        system = map(
            os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
        )
        reason = next((words for words in system if words in reason), reason[:300])
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written: {reason}"
        ) from error


def _abstract(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _alike(wanted, found, name) -> bool:
    """Whether both have an array of this name, of one shape."""
    here = name in wanted and name in found
    return here and tuple(found[name].shape) == wanted[name].shape


def _compare(path, wanted, found, apart) -> None:
    for name in sorted((wanted.keys() | found.keys()) - apart):
        if name not in found or name not in wanted:
            where = "this run" if name in wanted else "the checkpoint"
            raise UserError(
                f"--resume {path}: {name} is only in {where}: it was written by a run "
                f"with another --optimizer or other model flags (see its config.json)"
            )
        have, want = found[name], wanted[name]
        if tuple(have.shape) != want.shape or have.dtype != want.dtype:
            raise UserError(
                f"--resume {path}: {name} is {have.dtype}{list(have.shape)}, this run "
                f"has {want.dtype}{list(want.shape)}: give the flags of the run that "
                f"wrote it (see its config.json)"
            )


def steps_with_digest(folder: pathlib.Path) -> list[int]:
    """Steps whose checkpoint was completed, oldest first."""
    names = [file.name.removesuffix(".sha256") for file in folder.glob("*.sha256")]
    return sorted(
        int(name) for name in names if name.isdigit() and (folder / name).is_dir()
    )


def newest_whole(folder: pathlib.Path, warn) -> int:
    """Step of the newest checkpoint whose files all have their digest; 0: none.

    Newer ones that do not are set aside as STEP.damaged, and `warn` is told in a line.
    """
    if not folder.is_dir():
        return 0
    for step in reversed(steps_with_digest(folder)):
        wrong = damage(folder, step)
        if wrong is None:
            return step
        warn(f"warning: checkpoint {folder / str(step)} is damaged ({wrong}): skipped")
        aside = folder / f"{step}.damaged"
        _remove(aside)
        os.replace(folder / str(step), aside)
        _remove(_digest_path(folder, step))
    return 0


def clean(folder: pathlib.Path) -> None:
    """Removes what saves that never finished have left behind."""
    for left in (*folder.glob("*.orbax-checkpoint-tmp*"), *folder.glob("*.sha256.tmp")):
        _remove(left)


def write_digest(folder: pathlib.Path, step: int) -> None:
    """Writes STEP.sha256: atomic, and on disk before it returns."""
    hashes = _hashes(folder / str(step))
    assert hashes, f"nothing was written to {folder / str(step)}"
    beside = folder / f"{step}.sha256.tmp"
    with open(beside, "w") as file:
        json.dump(hashes, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, _digest_path(folder, step))


def damage(folder: pathlib.Path, step: int) -> str | None:
    """What is wrong with the checkpoint of `step`; None: it is whole."""
    try:
        said = json.loads(_digest_path(folder, step).read_bytes())
        found = _hashes(folder / str(step))
    except (OSError, ValueError) as error:
        return f"its digest cannot be checked: {error}"
    if not isinstance(said, dict):
        return "its digest is not a table of files"
    for name in sorted(said.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if said.get(name) != found[name]:
            return f"{name} is not what was written"
    return None


def _digest_path(folder: pathlib.Path, step: int) -> pathlib.Path:
    return folder / f"{step}.sha256"


def _hashes(folder: pathlib.Path) -> dict[str, str]:
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            hashes[path.relative_to(folder).as_posix()] = digest
    return hashes


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
