import hashlib
import os

import pytest

from tapfm.runtime.files import file_sha256, fingerprint, write_atomically


def test_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    file = tmp_path / "deep" / "result.json"
    write_atomically(file, b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, b"new, half written")
    assert file.read_bytes() == b"old"
    assert list(file.parent.iterdir()) == [file]


def test_digest_is_cached_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("TAPFM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "weights.bin"
    file.write_bytes(b"one")
    assert file_sha256(file) == hashlib.sha256(b"one").hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert file_sha256(file) == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"another")
    assert file_sha256(file) == hashlib.sha256(b"another").hexdigest()


def test_damaged_or_unwritable_cache_is_ignored(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TAPFM_CACHE", str(cache))
    file = tmp_path / "weights.bin"
    file.write_bytes(b"one")
    file_sha256(file)
    (cached,) = (cache / "sha256").iterdir()
    cached.write_text("{broken")
    assert file_sha256(file) == hashlib.sha256(b"one").hexdigest()
    monkeypatch.setenv("TAPFM_CACHE", str(file / "cannot-be-a-folder"))
    assert file_sha256(file) == hashlib.sha256(b"one").hexdigest()


def test_written_files_respect_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_fingerprint_depends_on_values_but_not_on_key_order():
    assert fingerprint({"a": 1, "b": [2, 3]}) == fingerprint({"b": [2, 3], "a": 1})
    others = [{"a": 1, "b": [3, 2]}, {"a": 1.5, "b": [2, 3]}, {"a": 1, "b": [2, 3], "c": None}, {"a": "1", "b": [2, 3]}]
    assert len({fingerprint(each) for each in [{"a": 1, "b": [2, 3]}, *others]}) == 5
