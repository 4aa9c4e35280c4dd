"""Unpacking what npm sent: files land in their folder, or nothing is written."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from emoji_data import unpack


def packed(file: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for member in members:
            member.size = 4 if member.isfile() else 0
            archive.addfile(member, io.BytesIO(b"text"))
    return file


def linked(name: str, target: str) -> tarfile.TarInfo:
    link = tarfile.TarInfo(name)
    link.type, link.linkname = tarfile.SYMTYPE, target
    return link


def test_files_are_written_below_the_folder(tmp_path: Path) -> None:
    archive = packed(tmp_path / "a.tgz", tarfile.TarInfo("package/img/a.png"), tarfile.TarInfo("package/emoji.json"))
    unpack(archive, tmp_path / "unpacked")
    files = {path.relative_to(tmp_path / "unpacked").as_posix() for path in (tmp_path / "unpacked").rglob("*.*")}
    assert files == {"package/img/a.png", "package/emoji.json"}
    assert (tmp_path / "unpacked" / "package" / "emoji.json").read_bytes() == b"text"


@pytest.mark.parametrize("name", ["../outside.txt", "package/../../outside.txt", "/{tmp}/outside.txt"])
def test_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    archive = packed(tmp_path / "a.tgz", tarfile.TarInfo(name.format(tmp=tmp_path)))
    with pytest.raises(SystemExit, match=r"a\.tgz holds '.*outside\.txt', a file outside its own folder"):
        unpack(archive, tmp_path / "unpacked")
    assert not (tmp_path / "outside.txt").exists()


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = linked("package/link", str(tmp_path / "elsewhere"))
    unpack(packed(tmp_path / "a.tgz", link, tarfile.TarInfo("package/link/a.txt")), tmp_path / "unpacked")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "unpacked" / "package" / "link" / "a.txt").is_file()
