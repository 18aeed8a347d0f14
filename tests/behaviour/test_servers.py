"""Processes that share code compiled before they started: pre-forking servers, pools."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKERS = 4

APPLICATION = """
import json, os, time, torch
from torch import nn
from tvmify import tvmify

torch.set_num_threads(1)
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
net = tvmify(plain, progress=False)


def answer(rows):
    x = torch.linspace(-1, 1, 4 * rows).reshape(rows, 4)
    with torch.inference_mode():
        is_same = torch.allclose(net(x), plain(x), atol=1e-5)
    return {"pid": os.getpid(), "same": is_same, "eager": net.cache_info().eager}


answer(1)


def application(environ, start_response):
    time.sleep(0.1)  # so that no worker takes all requests
    body = json.dumps(answer(int(environ["PATH_INFO"].strip("/")))).encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""


def ask(address: str, rows: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", timeout=120)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(address)
    try:
        connection.request("GET", f"/{rows}")
        return json.load(connection.getresponse())
    finally:
        connection.close()


def wait_for(address: Path, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server has ended"
        if address.exists():
            return
        time.sleep(0.1)
    pytest.fail("the server has not begun")


@pytest.mark.thorough
def test_workers_of_a_warm_server_answer_known_and_new_shapes(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(APPLICATION)
    address = tmp_path / "socket"
    options = f"--preload --workers {WORKERS} --timeout 120 --chdir {tmp_path}".split()
    command = [sys.executable, "-m", "gunicorn", *options, "--bind", f"unix:{address}"]
    with subprocess.Popen(
        [*command, f"--pythonpath={ROOT}", "served:application"], stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_for(address, server)
            with ThreadPoolExecutor(2 * WORKERS) as clients:
                for shapes in [[1] * 16, [2, 3, 4, 5] * 6]:
                    answers = list(clients.map(lambda rows: ask(str(address), rows), shapes))
                    assert len({answer["pid"] for answer in answers}) == WORKERS
                    assert all(answer["same"] and not answer["eager"] for answer in answers)
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "cache"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_computes_known_and_new_shapes(
    tmp_path: Path, method: str, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method != "fork":  # other methods differ only in how processes start: one of these builds
        monkeypatch.setenv("TVMIFY_CACHE_DIR", str(shared_cache))
    (tmp_path / "served.py").write_text(APPLICATION)
    script = f"""
    import multiprocessing
    if __name__ == "__main__":
        import served
        with multiprocessing.get_context({method!r}).Pool(1) as pool:
            answers = pool.map(served.answer, [1, 2, 1])
        assert all(answer["same"] and not answer["eager"] for answer in answers), answers
        assert answers[0]["pid"] != served.answer(1)["pid"]
        print("all")
    """
    file = tmp_path / "pool.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(script)}")
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr
