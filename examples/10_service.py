"""Serve a model with FastAPI: compiled before the first request, and monitored by Prometheus.

It shows `warmup` at startup, for requests with any number of rows; `on_miss="eager"`, so that no
request waits for the compiler; requests in several threads; and `cache_info()` as `/metrics`.

    pip install fastapi httpx uvicorn
    uvicorn --app-dir examples 10_service:app
    python examples/10_service.py    # or try it without a server
"""
# pyright: reportMissingImports=false
# `make install` does not install FastAPI.

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import torch
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient
from torch import nn
from torch.export import Dim

from tvmify import tvmify

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 3), nn.Softmax(-1)).eval()
net = tvmify(model, on_miss="eager", compare=False)


@contextlib.asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Compile, or load what another process has compiled, before the first request."""
    net.warmup([(1, 8)], [(Dim("rows", max=1024), 8)])  # torch.export specializes for size 1
    yield


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
def predict(rows: list[list[float]]) -> list[list[float]]:
    """Return the probability of each class for each row."""
    with torch.inference_mode():
        return net(torch.tensor(rows)).tolist()


@app.get("/metrics", response_class=PlainTextResponse)
def metrics() -> str:
    """Return the counters in the text format of Prometheus."""
    info = net.cache_info()
    counted = ("hits", "misses", "builds", "disk_hits", "eager")
    samples = {f"{name}_total": getattr(info, name) for name in counted}
    samples |= {f'seconds_total{{stage="{stage}"}}': spent for stage, spent in info.seconds.items()}
    return "".join(f"tvmify_{name} {value}\n" for name, value in samples.items())


def main() -> None:
    """Send requests from several threads, as a server would get them, and print the counters."""
    with TestClient(app) as client, ThreadPoolExecutor(4) as pool:
        requests = [torch.rand(rows, 8) for rows in range(1, 33)]
        answers = pool.map(lambda x: client.post("/predict", json=x.tolist()).json(), requests)
        for x, answer in zip(requests, answers, strict=True):
            torch.testing.assert_close(torch.tensor(answer), model(x))
        print(f"{len(requests)} requests of 1 to {len(requests)} rows, answered as in eager")
        print(client.get("/metrics").text)


if __name__ == "__main__":
    main()
