"""Two levels have loops of their own, which are compiled before training too."""

import pytest

import heeler
from heeler.levels.block_loops import BLOCK_LOOPS
from heeler.native import build


def test_a_sampler_is_not_made_where_its_loops_cannot_be_compiled(tmp_path, monkeypatch):
    for name, value in (("HEELER_CACHE", str(tmp_path)), ("PATH", str(tmp_path)), ("CC", "no-such-compiler")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(build, "_compilations", {build.LOOPS: None})  # the core's are there
    with pytest.raises(build.NoCompilerError, match="no-such-compiler"):
        heeler.Sampler(list(range(8)), batch_size=2, order=heeler.two_levels())
    assert heeler.levels.BlockHerd.c_sources() == (build.LOOPS, BLOCK_LOOPS)
