"""A rank's device and address."""

import os
import socket

import deepspeed
import deepspeed.ops
import pytest
import torch

from openkto.distributed.launch import _check_own_address, _join, _take_gpu, device_index
from openkto.errors import ConfigError


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees():
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1) == 0  # --gpus-per-task=1
    with pytest.raises(ConfigError, match="got 4 for rank 4 of this node"):
        device_index(4, 4)


def test_deepspeed_finds_the_only_gpu_that_a_rank_sees(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert _take_gpu(3) == torch.device("cuda", 0)
    assert chosen == [0]
    assert os.environ["LOCAL_RANK"] == "0"


def test_nodes_that_know_themselves_by_a_loopback_address_alone_are_one_sentence(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    with pytest.raises(ConfigError, match=r"which stands for (127\.|::1).*GLOO_SOCKET_IFNAME"):
        _check_own_address()
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(ConfigError, match="stands for no address"):
        _check_own_address()
    monkeypatch.setattr(socket, "gethostname", lambda: "198.51.100.7")
    _check_own_address()


@pytest.mark.parametrize(("name", "value"), [("GLOO_SOCKET_IFNAME", "eth0"), ("WORLD_SIZE", "2")])
def test_one_node_or_a_named_interface_may_have_any_name(monkeypatch, name, value):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    _check_own_address()


def test_a_port_that_another_program_has_is_one_sentence_with_the_flag(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in (ranks | {"LOCAL_SIZE": "2"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", {})  # as `start_process` does: no C++ op is built
        with pytest.raises(ConfigError, match=f"got {port}, which another program has.* Pass another --master_port"):
            _join("gloo")
