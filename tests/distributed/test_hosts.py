"""Two hosts: two network namespaces joined by a cable, a torchrun with two ranks in each, rendezvous over c10d."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ADDRESSES = ("10.213.77.1", "10.213.77.2")
EACH = 2
SCRIPT = Path(__file__).with_name("torchrun_script.py")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    names = [f"heeler-{os.getpid()}-{number}" for number in range(2)]
    cables = [f"hl{os.getpid() % 100000}{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError:
        pytest.skip("this machine allows no network namespaces")
    try:
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, cables, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_two_hosts(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "killed").touch()  # nobody is killed here
    runs = []
    for number, (name, cable) in enumerate(hosts):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "GLOO_SOCKET_IFNAME": cable,
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={EACH}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29517", "--rdzv-id=heeler"]
        command += [f"--rdzv-conf=is_host={1 - number}", f"--local-addr={ADDRESSES[number]}"]
        runs.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, str(SCRIPT), str(tmp_path)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(errors)[-3000:]
    ranks = [torch.load(tmp_path / f"seen-{rank}.pt", weights_only=True) for rank in range(2 * EACH)]
    for epoch in range(4):
        together = [index for seen in ranks for at, index in seen if at == epoch]
        assert sorted(together) == list(range(40))
