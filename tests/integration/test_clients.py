"""The script of docs/clients.md that serves: by its server where that is installed, else loaded."""

import json
import re
import socket
import time
import urllib.request
from pathlib import Path

import torch
from cli_tools import prose
from transformers.cli import serve
from transformers.cli.serving.model_manager import ModelManager
from transformers.utils.import_utils import is_serve_available

import kvalloc

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def test_the_servers_models_are_reduced(models, monkeypatch):
    served, applied, apply, real = [], [], kvalloc.apply, serve.Serve

    def serve_here(force_model, port):
        here = {"force_model": force_model, "device": "cpu", "dtype": "float32"}
        if is_serve_available():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            server = real(**here, host="127.0.0.1", port=port, non_blocking=True)
            served.append((server, port))
        else:
            served.append((ModelManager(**here), None))

    def apply_here(model, **options):
        applied.append(apply(model, **options))
        return applied[-1]

    monkeypatch.setattr(ModelManager, "_load_model", ModelManager._load_model)  # put back
    monkeypatch.setattr(serve, "Serve", serve_here)
    monkeypatch.setattr(kvalloc, "apply", apply_here)
    script = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert script.count("\n") <= 30
    model = str(models / "chatty")
    exec(script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", model), {})
    (server, port), (its,) = served[0], applied
    try:
        if port is None:
            loaded = server.load_model_and_processor(model)[0]
            loaded.generate(torch.arange(2, 82)[None], max_new_tokens=4)
        else:
            while not server.server.started:
                time.sleep(0.05)
            messages = [{"role": "user", "content": prose(80)}]
            body = json.dumps({"model": model, "messages": messages, "max_tokens": 4}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                body,
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert json.load(reply)["choices"][0]["message"]["content"]
    finally:
        its.remove()
        if port is not None:
            server.kill_server()
    assert its.last_cache.get_seq_length() > 80
    assert its.last_cache.share <= 0.25
