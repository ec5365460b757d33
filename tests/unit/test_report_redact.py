"""What a report leaves out: secrets, and who and where the user is."""

from __future__ import annotations

import pytest

from opkiln.report import redact
from opkiln.settings import override


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/home/ann/x", "~/x"),
        ("-I/home/ann/include -L/scratch/ann/lib", "-I~/include -L/scratch/<user>/lib"),
        ("/home/annabel/x", "/home/annabel/x"),
        ("/home/ann", "~"),
        ("/tmp/pytest-of-ann/x", "/tmp/pytest-of-<user>/x"),
        ("ann is a word", "ann is a word"),
        ("/home/ann.old/x", "/home/<user>.old/x"),
        ("/home/ann:/home/ann/lib", "~:~/lib"),
        ("file:///home/ann/x", "file://~/x"),
        ("/data/home/ann/x", "/data/home/<user>/x"),
        ("-Wl,-rpath,/home/ann/lib", "-Wl,-rpath,~/lib"),
    ],
)
def test_home_and_name_are_taken_out_of_paths(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redact.os, "getuid", lambda: 4_000_000_000)  # nobody in the passwd file
    with override(home="/home/ann"):
        assert redact.hide_user(before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("-DHF_TOKEN=abc", "-DHF_TOKEN=***"),
        ("-DHF_TOKEN=abc def", "-DHF_TOKEN=***"),
        ('-DPASSPHRASE="one two"', "-DPASSPHRASE=***"),
        ("-DAUTH=x", "-DAUTH=***"),
        ("-DSIGNING_KEY=x", "-DSIGNING_KEY=***"),
        ("-DapiKey=x", "-DapiKey=***"),
        ("-DDBPASSWD=x", "-DDBPASSWD=***"),
        ("https://host/x?access_token=abc&n=1", "https://host/x?access_token=***"),
        ("--token abc", "--token ***"),
        ("X-Auth-Token: abc", "X-Auth-Token: ***"),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ("https://me:p@w@host/x", "https://***@host/x"),
        ("/x/ghp_0123456789abcdef/y", "/x/***/y"),
        ("-DX=hf_0123456789abcdef", "-DX=***"),
        ("-DX=sk-proj-0123456789ab", "-DX=***"),
        ("-DX=AKIAIOSFODNN7EXAMPLE", "-DX=***"),
        ("-DX=glpat-0123456789", "-DX=***"),
        ("-DX=github_pat_0123456789", "-DX=***"),
        ("-DMAX_TOKENS=4096", "-DMAX_TOKENS=4096"),
        ("-DTOKENIZER=bpe", "-DTOKENIZER=bpe"),
        ("-DKEY_SIZE=8", "-DKEY_SIZE=8"),
        ("-DMONKEY=1", "-DMONKEY=1"),
        ("-DAUTHOR=ann", "-DAUTHOR=ann"),
        ("/opt/hf_transfer/lib", "/opt/hf_transfer/lib"),
        ("https://me:pw@host/x", "https://***@host/x"),
        ("-Dmy_password=x", "-Dmy_password=***"),
        ("-DTOKENS_PER_STEP", "-DTOKENS_PER_STEP"),
        ("/opt/secret/lib", "/opt/secret/lib"),
    ],
)
def test_what_looks_like_a_secret_is_starred_out(before: str, after: str) -> None:
    assert redact.hide_secrets(before) == after


def test_the_word_behind_an_option_for_a_secret_is_one() -> None:
    words = ("g++", "--token", "-abc", "--auth=x y", "--verbose", "abc", 3)
    starred = ("g++", "--token", "***", "--auth=***", "--verbose", "abc", 3)
    assert redact.hide_secrets_in_words(words) == starred


def test_the_home_of_root_is_not_every_directory_of_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redact.os, "getuid", lambda: 4_000_000_000)
    with override(home="/root"):
        said = redact.hide_user("/data/root/x /root/x -I/root/x /data/v2/root")
    assert said == "/data/root/x ~/x -I~/x /data/v2/root"
