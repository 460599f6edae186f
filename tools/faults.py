"""Seed faults that were mended once, one at a time, and see that a test fails for each.

    python tools/faults.py [NAME ...] [--everything] [--list]

A NAME is the name of a fault, or a part of it. Run this before and after you rewrite or remove
tests: each fault must stay red. All of them take about ten minutes on two quiet cores.

Each fault is put into a copy of ``src`` in a temporary folder, and pytest runs against that copy
until the first test fails. Red means that a test failed. GREEN means that nothing noticed the
fault. BROKEN means that pytest could not run the tests, so the fault says nothing about them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "torchlift"
TESTS = ROOT / "tests"

#: Seconds of one test, and of all tests of a fault, after which a hang counts as red.
TEST_SECONDS, SECONDS = 120, 600


class Fault(NamedTuple):
    """A fault that was mended once.

    Attributes:
        name: What went wrong, in plain words.
        file: The file below ``src/torchlift``.
        old: The text of today, which occurs once in the file.
        new: The text with the fault.
        tests: Files below ``tests`` in which a test must fail, with spaces between them.
        slow: Whether slow tests of these files run, too.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    slow: bool = False


FAULTS = [
    # ---- formats
    Fault(
        "bytes between two tensors of a safetensors file are accepted",
        "formats/safetensors.py",
        "if begin != position:",
        "if begin < position:",
        "hostile/test_hazards.py",
    ),
    Fault(
        "a safetensors file that another program rewrote is judged by its old checksums",
        "formats/safetensors.py",
        "list(stored)) if is_last else {}",
        "list(stored))",
        "save/test_save.py",
    ),
    Fault(
        "tensors of a new safetensors file are not aligned",
        "formats/safetensors.py",
        "key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.key)",
        "key=lambda tensor: tensor.key",
        "formats/test_safetensors.py",
    ),
    Fault(
        "true counts as a size of a tensor",
        "formats/source.py",
        "if not is_list or type(value) is not int or not 0 <= value < 1 << 63:",
        "if not is_list or not isinstance(value, int) or not 0 <= value < 1 << 63:",
        "hostile/test_hazards.py",
    ),
    Fault(
        "the last of two equal names in a JSON object wins",
        "formats/source.py",
        "if len(result) != len(pairs):",
        "if len(result) > len(pairs):",
        "hostile/test_hazards.py",
    ),
    Fault(
        "a range of a URL is cut short by a window inside of another one",
        "formats/source.py",
        "if start + len(data) > end:",
        "if end < start + len(data) or True:",
        "formats/test_source.py formats/test_requests.py",
    ),
    Fault(
        "strides lead a tensor of a torch file outside of its storage",
        "formats/torch_zip.py",
        "if numel and (offset + span) * itemsize > storage.nbytes:",
        "if numel and (offset + numel) * itemsize > storage.nbytes:",
        "hostile/test_hazards.py",
    ),
    Fault(
        "a storage is larger than the pickle says",
        "formats/torch_zip.py",
        "if nbytes != storage.nbytes:",
        "if nbytes > storage.nbytes:",
        "hostile/test_hazards.py formats/test_torch_zip.py",
    ),
    Fault(
        "a file of a big-endian machine is read with swapped bytes",
        "formats/torch_zip.py",
        'if text == "big":',
        'if text == "BIG":',
        "formats/test_torch_zip.py",
    ),
    Fault(
        "a view of a few bytes may show terabytes",
        "formats/torch_zip.py",
        "return nbytes > _MAX_REPEATED and nbytes > _MAX_REPEAT * stored",
        "return False",
        "hostile/test_amplification.py hostile/test_hazards.py",
    ),
    Fault(
        "the checksum of a storage is taken from another record of its name",
        "formats/torch_zip.py",
        "used |= self.storages.keys()",
        "used |= set()",
        "formats/test_verify.py formats/test_torch_zip.py hostile/test_names.py",
    ),
    Fault(
        "a zip archive is read by the first of two directories, where torch takes the last",
        "formats/zip_archive.py",
        "at = tail.rfind(END_MAGIC,",
        "at = tail.find(END_MAGIC,",
        "hostile/test_two_readers.py formats/test_torch_zip.py",
    ),
    Fault(
        "records of a zip archive overlap",
        "formats/zip_archive.py",
        "if each.offset < end:",
        "if each.offset < 0:",
        "hostile/test_hazards.py hostile/test_amplification.py",
    ),
    Fault(
        "a compressed record inflates to more than its header says",
        "formats/zip_archive.py",
        "while not engine.eof and made <= record.size:",
        "while not engine.eof:",
        "formats/test_npz.py",
    ),
    Fault(
        "names of records that differ only in case are accepted, where torch reads one for both",
        "formats/zip_archive.py",
        "if text != text.lower() and len(small",
        "if text == text.lower() and len(small",
        "hostile/test_two_readers.py hostile/test_hazards.py",
    ),
    Fault(
        "integers of any length are dictionary keys, so they can be chosen to collide",
        "formats/unpickle.py",
        "if not -(1 << 63) <= key < 1 << 64:",
        "if key is None:",
        "hostile/test_hazards.py",
    ),
    Fault(
        "keys of equal hashes cost nothing, so a small file takes hours",
        "formats/unpickle.py",
        "self.spend(cost * met)",
        "self.spend(0)",
        "hostile/test_hazards.py",
    ),
    Fault(
        "empty containers cost nothing, so a small file takes gigabytes",
        "formats/unpickle.py",
        "        m.budget.spend(nbytes)\n",
        "",
        "hostile/test_amplification.py",
        slow=True,
    ),
    Fault(
        "an integer that C and Python read differently is accepted",
        "formats/unpickle.py",
        'if line not in (b"00", b"01") and not _WHOLE.fullmatch(line):',
        'if line not in (b"00", b"01") and not line:',
        "hostile/test_hazards.py hostile/test_two_readers.py",
    ),
    Fault(
        "a legacy file that is also a tar archive is read as a stream, where torch reads the tar",
        "formats/torch_legacy.py",
        "if _is_summed(source.read(0, min(_BLOCK, source.size))):",
        "if not source.size:",
        "hostile/test_two_readers.py",
    ),
    Fault(
        "a storage that is a view of another one is read from its start",
        "formats/torch_legacy.py",
        "if isinstance(ref, StorageRef) and identity[5] is not None:",
        "if isinstance(ref, StorageRef) and identity[5] is ref:",
        "hostile/test_hazards.py",
    ),
    Fault(
        "a big-endian array of NumPy is read with swapped bytes",
        "formats/npz.py",
        'swapped = code[0] == ">" and ITEMSIZE[dtype] > 1',
        "swapped = False",
        "formats/test_npz.py",
    ),
    Fault(
        "a column-major array of NumPy is read in rows",
        "formats/npz.py",
        "row_major(shape[::-1])[::-1] if is_fortran else row_major(shape)",
        "row_major(shape)",
        "formats/test_npz.py",
    ),
    Fault(
        "the alignment that a GGUF file states is ignored",
        "formats/gguf.py",
        "            alignment = value\n",
        "            pass\n",
        "formats/test_gguf.py",
    ),
    Fault(
        "the order of the dimensions of GGUF is taken for torch's",
        "formats/gguf.py",
        "dense_shape(sizes[::-1],",
        "dense_shape(sizes,",
        "formats/test_gguf.py",
    ),
    Fault(
        "FSDP over tensor parallel gets slices in the wrong order if sizes do not divide evenly",
        "formats/boxes.py",
        "if factor > 1 and factor == right:",
        "if factor > 1 and factor == right < 0:",
        "formats/test_boxes.py",
    ),
    Fault(
        "slices of ranks that overlap and leave a gap of the same size are accepted",
        "formats/pieces.py",
        "if any(corners.values()):",
        "if sum(math.prod(each.shape) for each in chunks) != math.prod(shape):",
        "formats/test_pieces.py",
    ),
    Fault(
        "boxes of two files become one box, because their offsets fit",
        "formats/boxes.py",
        "place = (chunk.file, chunk.packed, chunk.held)",
        "place = (chunk.packed, chunk.held)",
        "formats/test_boxes.py",
    ),
    Fault(
        "rows of a tensor with gaps are written as one run",
        "formats/boxes.py",
        "(far, here) == (last.size * last.in_file, last.size * last.here)",
        "far == last.size * last.in_file",
        "formats/test_boxes.py transfer/test_read.py",
    ),
    Fault(
        "the later of two values of one dotted key wins",
        "formats/flattening.py",
        "if is_known and self.containers.items(value, depth) is None:",
        "if is_known and self.containers is None:",
        "test_checkpoint.py test_tree.py formats/test_torch_zip.py",
    ),
    Fault(
        "a root that could mean two containers takes the first",
        "formats/flattening.py",
        'if len(found) > 1:\n        raise FormatError(\n            "this root could mean',
        'if len(found) > 9:\n        raise FormatError(\n            "this root could mean',
        "test_checkpoint.py test_tree.py test_doors.py",
    ),
    Fault(
        "a model's container is not found beside plain data whose name has a dot",
        "formats/flattening.py",
        "if not isinstance(item, others))",
        "if item is not others)",
        "save/test_convert.py plan/test_verdict.py test_tree.py",
    ),
    Fault(
        "an index names a file outside of its folder",
        "formats/sharded.py",
        'if ".." in name.split("/"):',
        'if ".." in name.split("\\\\"):',
        "hostile/test_hazards.py",
    ),
    Fault(
        "a stale file of a rank is taken for the rank's",
        "formats/sharded.py",
        "if other := found.get(number):",
        "if other := None:",
        "formats/test_ranks.py formats/test_folders.py formats/test_zero.py",
    ),
    Fault(
        "a scale of quantised values is cast with them",
        "_convert.py",
        "if made != stored and entry.key in quantised.of_scales:",
        "if made != stored and entry.key in ():",
        "save/test_quantised.py",
    ),
    # ---- _transfer and _store
    Fault(
        "a read that the system cuts short is resumed at the wrong place",
        "_transfer/reading.py",
        "            buffers[0] = buffers[0][got:]\n",
        "            pass\n",
        "transfer/test_faults.py transfer/test_read.py",
    ),
    Fault(
        "a load of a thousand files needs a thousand descriptors",
        "_transfer/files.py",
        "if len(local) > MOST_OPEN:",
        "if len(local) < 0:",
        "test_checkpoint.py",
    ),
    Fault(
        "a file that is overwritten in place during a load is not noticed",
        "_transfer/files.py",
        "if is_same and found != stamp:",
        "if is_same and found.size != stamp.size:",
        "test_torn_reads.py",
    ),
    Fault(
        "a hard link to an open file counts as a change of its content",
        "_store/files.py",
        "return cls(now.st_size, now.st_mtime_ns,",
        "return cls(now.st_size, now.st_ctime_ns,",
        "test_torn_reads.py test_checkpoint.py",
    ),
    Fault(
        "the bytes before the first page of a range are not read when small pages are filled",
        "_transfer/pages.py",
        "                    if start < first:\n                        yield start, first\n",
        "",
        "transfer/test_pages.py",
    ),
    Fault(
        "values that a cast rounds down count as overflown",
        "_transfer/casting.py",
        "return float(info.max) + float(info.eps) * 2.0 ** math.floor(math.log2(info.max)) / 2",
        "return float(info.max)",
        "save/test_overflow.py load/test_finite.py",
    ),
    Fault(
        "small tensors are kept for a later write while their memory gets other values",
        "_transfer/write.py",
        "self.add(start, bytes(run))",
        "self.add(start, run)",
        "save/test_save.py save/test_convert.py transfer/test_write.py",
    ),
    Fault(
        "new shards overwrite the shards of a set that readers have open",
        "_transfer/write.py",
        "if exists or is_there(self._head):",
        "if not names:",
        "save/test_beside.py save/test_faults.py",
    ),
    Fault(
        "the files of an index that cannot be read are removed",
        "_transfer/write.py",
        "                return None\n            needed |= found\n",
        "                continue\n            needed |= found\n",
        "save/test_beside.py",
    ),
    Fault(
        "a file loses the rights of a group when a save replaces it",
        "_transfer/write.py",
        "            os.chmod(self.descriptor, self._mode)\n",
        "            pass\n",
        "transfer/test_write.py",
    ),
    Fault(
        "a DataLoader's worker keeps the lock of a save that has ended",
        "_transfer/write.py",
        "            with suppress(OSError):\n                flock(self.descriptor, LOCK_UN)\n",
        "",
        "save/test_beside.py",
    ),
    Fault(
        "a token for one host is sent to the host of a redirect",
        "_store/http.py",
        "if host == _host(origin):",
        "if host or origin:",
        "formats/test_url_faults.py",
        slow=True,
    ),
    Fault(
        "a redirect from https to http is followed",
        "_store/http.py",
        'if scheme == "https" or scheme == before == "http":',
        'if scheme in ("https", "http"):',
        "formats/test_url_faults.py",
        slow=True,
    ),
    Fault(
        "an object that changes between two requests is read half old and half new",
        "_store/http.py",
        "if size != stamp.size or not is_same:",
        "if size != stamp.size:",
        "formats/test_url_faults.py load/test_urls.py",
    ),
    Fault(
        "an upload that is cancelled becomes an object with half of the bytes",
        "_store/uploads.py",
        "                raise _Cancelled\n",
        "                return\n",
        "save/test_save_urls.py",
    ),
    Fault(
        "the escapes of a file URL are taken for the name",
        "_store/places.py",
        "name = slash + unquote(path)",
        "name = slash + path",
        "formats/test_urls.py formats/test_detect.py test_checkpoint.py",
    ),
    # ---- _system
    Fault(
        "Ctrl-C during a change is lost instead of held back",
        "_system/interrupts.py",
        "        signal.signal(signal.SIGINT, handler)\n        deliver_interrupt()\n",
        "        signal.signal(signal.SIGINT, handler)\n        _interrupts.clear()\n",
        "system/test_interrupts.py save/test_interrupts.py",
    ),
    Fault(
        "children that are forked draw the same random numbers",
        "_system/zygote.py",
        "    torch.default_generator.seed()\n",
        "",
        "system/test_zygote.py",
    ),
    Fault(
        "a child has rights that its caller has given up",
        "_system/zygote.py",
        "return zygote if zygote.rights == rights and zygote.await_start(timeout) else None",
        "return zygote if zygote.await_start(timeout) else None",
        "system/test_zygote.py",
    ),
    Fault(
        "the memory of the machine counts as free in a container with a limit",
        "_system/memory.py",
        "return min(rooms)",
        "return rooms[0]",
        "system/test_free_memory.py",
    ),
    Fault(
        "the search for live models runs the code of a lazy table",
        "_system/containers.py",
        "if type(one) not in (dict, OrderedDict, list, tuple, set):",
        "if not isinstance(one, (dict, list, tuple, set)):",
        "skeleton/test_undisturbed.py",
    ),
    # ---- _checkpoint
    Fault(
        "statistics of an open checkpoint show what the caller has written to its tensors",
        "_checkpoint/checkpoint.py",
        "return stats_of(ckpt._mapped().blocks(entry))",
        "return stats_of(self._mapped().blocks(entry))",
        "test_written_views.py",
    ),
    Fault(
        "two keys of one joined tensor become two tensors",
        "_checkpoint/checkpoint.py",
        "made[spot] = made[spot] if spot in made else view(entry)",
        "made[spot] = view(entry)",
        "formats/test_ranks.py",
    ),
    Fault(
        "a conjugate view is read without its conjugation",
        "_checkpoint/checkpoint.py",
        'if "conjugate" in entry.encoding:',
        'if "conjugated" in entry.encoding:',
        "test_dtypes.py formats/test_torch_zip.py test_checkpoint.py",
    ),
    Fault(
        "integers of 64 bits are compared as floats, so some that differ count as equal",
        "_checkpoint/comparison.py",
        "    return values.to(torch.float64 if values.is_floating_point() else torch.int64)\n",
        "    return values.to(torch.float64)\n",
        "test_diff.py",
    ),
    # ---- _save and _convert
    Fault(
        "a square matrix and its transpose are saved as one tensor",
        "_save/values.py",
        "return self.memory, self.first, self.shape, self.stride, self.dtype",
        "return self.memory, self.first, self.shape, self.dtype",
        "save/test_save.py",
    ),
    Fault(
        "a small view is saved with all of its large memory",
        "_save/values.py",
        "0 < stop - start <= alone:",
        "0 < stop - start:",
        "save/test_save.py",
    ),
    Fault(
        "a small conjugate view is saved without its conjugation",
        "_save/blocks.py",
        "if not is_plain or tensor.is_conj() or tensor.is_neg():",
        "if not is_plain:",
        "save/test_save.py test_dtypes.py save/test_kinds.py",
    ),
    Fault(
        "ties of a model are lost in safetensors",
        "_save/layouts.py",
        "**({TIED_KEYS: json.dumps(noted)} if noted else {})}",
        "}",
        "save/test_save.py",
    ),
    Fault(
        "a shard is larger than its limit",
        "_save/layouts.py",
        "        room -= value.stored.nbytes\n",
        "",
        "save/test_save.py save/test_convert.py",
    ),
    Fault(
        "a file that another rank has written in part becomes the checkpoint",
        "_save/files.py",
        "if found != nbytes:",
        "if found is None:",
        "save/test_faults.py save/test_save.py distributed/test_save.py",
    ),
    Fault(
        "Ctrl-C inside of torch's writer becomes a RuntimeError",
        "_save/pickling.py",
        "            raise error.__context__ from None\n",
        "            raise\n",
        "save/test_interrupts.py save/test_faults.py",
    ),
    Fault(
        "a best loss of NumPy cannot be loaded with weights_only",
        "_save/pickling.py",
        "return value.item() if is_numpys else value",
        "return value",
        "save/test_save.py",
    ),
    Fault(
        "a save leaves a model of another format in the folder, which readers take",
        "_save/target.py",
        "        if other:\n",
        "        if not head:\n",
        "save/test_beside.py save/test_save.py",
    ),
    Fault(
        "a transform that writes to its argument changes tied keys twice",
        "_convert.py",
        "made.detach().clone(), self._ckpt.path)",
        "made.detach(), self._ckpt.path)",
        "save/test_convert.py",
    ),
    Fault(
        "a conjugate result of a transform is written without its conjugation",
        "_convert.py",
        "        tensor = tensor.resolve_conj().resolve_neg()\n",
        "",
        "save/test_convert.py",
    ),
    Fault(
        "a conversion of a damaged file passes",
        "_convert.py",
        "if verify and not dry_run and transform is None:",
        "if verify and dry_run and transform is None:",
        "save/test_convert.py save/test_convert_sources.py",
    ),
    Fault(
        "convert replaces a file that another program has made in the meantime",
        "_convert.py",
        "            _require_free(target, overwrite)\n            if check",
        "            if check",
        "save/test_convert.py",
    ),
    # ---- remap, _model and _skeleton
    Fault(
        "strip takes a part of a name for the prefix",
        "remap/names.py",
        'return key.removeprefix(self.prefix + ".")',
        'return key.removeprefix(self.prefix).removeprefix(".")',
        "remap/test_remap.py",
    ),
    Fault(
        "a rename that matches nothing passes",
        "remap/names.py",
        "return None if any(self(key) != key for key in keys) else self",
        "return None",
        "remap/test_remap.py plan/test_match.py save/test_convert.py",
    ),
    Fault(
        "the shortest prefix of a device map wins",
        "remap/maps.py",
        "for p in reversed(ancestors(name)) if p in self",
        "for p in ancestors(name) if p in self",
        "remap/test_remap.py remap/test_locations.py",
    ),
    Fault(
        "members of other sizes than the rule's are merged, so no split gives them back",
        "remap/merging.py",
        "if [sizes[0] * share for share in shares] != [size * shares[0] for size in sizes]:",
        "if not sizes:",
        "remap/test_merging.py",
    ),
    Fault(
        "two keys of a wrapped model become one name, and one value is lost",
        "_model/state.py",
        "        if name in found:\n",
        "        if name in ():\n",
        "distributed/test_state_dict.py load/test_wrapped.py save/test_save.py",
    ),
    Fault(
        "a load writes to the module versions of the caller's state dict",
        "_model/state.py",
        "{path: dict(version) for path, version in versions.items()}",
        "{path: version for path, version in versions.items()}",
        "save/test_versions.py",
    ),
    Fault(
        "a child of the name module is taken for a wrapper",
        "_model/names.py",
        "return keys if len(set(keys)) == len(set(names)) else names",
        "return keys",
        "load/test_wrapped.py distributed/test_wrapped.py",
    ),
    Fault(
        "a transform returns another layout of a DTensor, and its values go to the wrong ranks",
        "_model/dtensor.py",
        "if is_dtensor(made) and spread_of(made) == spread_of(like):",
        "if is_dtensor(made):",
        "distributed/test_load.py",
    ),
    Fault(
        "a skeleton changes the random state of the program",
        "_skeleton/construction.py",
        "    finally:\n        torch.set_rng_state(state)\n",
        "    finally:\n",
        "skeleton/test_construction.py",
    ),
    Fault(
        "a constructor that adapts a live model changes it twice",
        "_skeleton/construction.py",
        "if _building.run is not None or _gets_live_module(factory, args, kwargs):",
        "if _building.run is not None:",
        "skeleton/test_skeleton.py skeleton/test_construction.py",
    ),
    # ---- measure, cli and _digest
    Fault(
        "a peak between two samples of the program is not seen",
        "measure/meter.py",
        "return max(sample.anonymous for sample in [*self._taken, *self._peaks])",
        "return max(sample.anonymous for sample in self._taken)",
        "measure/test_measure.py",
    ),
    Fault(
        "a long timeline loses its peaks",
        "measure/sampling.py",
        "max(pair, key=lambda seen: seen.resident)",
        "pair[0]",
        "measure/test_measure.py",
    ),
    Fault(
        "a file that would run code ends the command as a damaged one",
        "cli/__init__.py",
        "return args.trouble or (3 if isinstance(error, UnsafeError) else 1)",
        "return args.trouble or 1",
        "cli/test_cli.py",
    ),
    Fault(
        "a pattern of --rename with an equals sign is cut",
        "cli/rules.py",
        'pattern, _, replacement = text.rpartition("=")',
        'pattern, _, replacement = text.partition("=")',
        "cli/test_cli.py cli/test_plan.py",
    ),
    Fault(
        "a digest depends on the order of names",
        "_digest.py",
        'b"".join(sorted(found.values()))',
        'b"".join(found.values())',
        "test_digest.py",
    ),
]


def put_into(site: Path, fault: Fault) -> None:
    """Copy the package into an empty folder, with a fault.

    Raises:
        ValueError: If the old text does not occur exactly once.
    """
    # With the times of the files, so that Python takes the compiled ones, too.
    shutil.copytree(PACKAGE, site / "torchlift")
    path = site / "torchlift" / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: the old text occurs {text.count(fault.old)} times")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def list_tests(fault: Fault, everything: bool) -> list[str]:
    """Return the test files of a fault, or the complete rooms in which these are."""
    files = [TESTS / name for name in fault.tests.split()]
    if everything:
        files = [file if file.parent == TESTS else file.parent for file in files]
    return [*dict.fromkeys(map(str, files))]


def run_tests(site: Path, tests: list[str], lane: str, scratch: Path) -> tuple[int | None, str]:
    """Run tests against the package in a folder, until the first one fails.

    Returns:
        The exit status of pytest, None after `SECONDS`, and the first test that failed.
    """
    path = [site, ROOT / "build" / "apart" / "site-packages"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TORCHLIFT_SITE": str(site),
        "TMPDIR": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONNOUSERSITE": "1",
    }
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", lane, f"--timeout={TEST_SECONDS}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        status, output = None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return status, failed[1] if failed else output.strip().rpartition("\n")[2]


def judge(fault: Fault, everything: bool) -> tuple[str, str, float]:
    """Return red, GREEN or BROKEN for a fault, the first test that failed, and the seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as folder:
        site, scratch = Path(folder) / "site", Path(folder) / "tmp"
        scratch.mkdir()
        lane = "" if fault.slow else "not slow"  # of the markers
        put_into(site, fault)
        status, first = run_tests(site, list_tests(fault, everything), lane, scratch)
    is_red = status is None or status == 1 or status < 0  # a hang, a failure or a crash
    verdict = "red" if is_red else "BROKEN" if status else "GREEN"
    return verdict, first or "(no end)", time.monotonic() - start


def main() -> int:
    """Run the faults that the arguments name, and print a row for each."""
    parser = argparse.ArgumentParser(description="Seed faults that were mended once.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a fault's name")
    parser.add_argument("--everything", action="store_true", help="run the complete rooms")
    parser.add_argument("--list", action="store_true", help="list the faults, and run nothing")
    args = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not args.names or any(name in fault.name for name in args.names)
    ]
    if not chosen:
        parser.error("no fault has such a name")
    bad = 0
    for fault in chosen:
        if args.list:
            print(f"{fault.file}: {fault.name}")
            continue
        verdict, first, seconds = judge(fault, args.everything)
        bad += verdict != "red"
        print(f"{verdict:6} {seconds:4.0f} s  {fault.name}  [{first}]", flush=True)
    if not args.list:
        print(f"{len(chosen) - bad} of {len(chosen)} faults are red")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
