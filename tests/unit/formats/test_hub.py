"""Profiles on the hub: the real client, against a hub of one repository in a folder."""

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cli_tools import refused, succeed
from factories import make_budget_profile, make_scores
from huggingface_hub import constants

from kvalloc.errors import InputError, MissingDependencyError, ProfileFileError
from kvalloc.formats.shipped_profiles import load_fitted, load_profile

REPO, CLOSED = "me/budgets", "me/closed"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download of a small file asks for."""

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        found = re.fullmatch(r"/(\w+/\w+)/resolve/(\w+)/(.+)", self.path.partition("?")[0])
        if found is None or found[1] not in self.server.repos:
            closed = found is not None and found[1] == CLOSED
            self.answer(
                403 if closed else 404, X_Error_Code="GatedRepo" if closed else "RepoNotFound"
            )
            return
        commits = self.server.repos[found[1]]
        commit = list(commits)[-1] if found[2] == "main" else found[2]
        if commit not in commits:
            self.answer(404, X_Error_Code="RevisionNotFound")
        elif found[3] not in commits[commit]:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        else:
            content = commits[commit][found[3]]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.answer(200, content, ETag=etag, X_Repo_Commit=commit)

    do_HEAD = do_GET


@pytest.fixture
def server(tmp_path, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.repos = {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_none")
        yield server
        server.shutdown()


def pushed(server, file, name=None):
    """Put a file into the repository, beside what is there; return its address."""
    commits = server.repos.setdefault(REPO, {})
    files = dict(commits[list(commits)[-1]]) if commits else {}
    files[name or file.name] = file.read_bytes()
    commit = hashlib.sha1(str(len(commits)).encode()).hexdigest()
    commits[commit] = files
    return f"hf://{REPO}@{commit}/{name or file.name}"


@pytest.fixture
def profile(tmp_path):
    profile = make_budget_profile([[10, 17], [40, 6]])
    profile.save(tmp_path / "p.json")
    return profile


def test_what_is_there_is_loaded(server, profile, tmp_path):
    where = pushed(server, tmp_path / "p.json")
    assert load_profile(where) == profile
    assert load_profile(f"hf://{REPO}/p.json") == profile
    other = profile.replace(budgets=profile.budgets + 0, created="2025-01-01")
    other.save(tmp_path / "p.json")
    pushed(server, tmp_path / "p.json", "deeper/q.json")
    assert load_profile(f"hf://{REPO}@main/deeper/q.json") == other
    assert load_profile(where) == profile
    server.shutdown()
    server.server_close()
    assert load_profile(f"hf://{REPO}/deeper/q.json") == other  # from the cache


def test_commands_take_what_is_there(server, profile, tmp_path):
    where = pushed(server, tmp_path / "p.json")
    ran = succeed("inspect", where)
    assert where in ran.out
    scores = make_scores()
    scores.save(tmp_path / "s.safetensors")
    pushed(server, tmp_path / "s.safetensors")
    succeed("solve", f"hf://{REPO}/s.safetensors", "--budget", "50%", "-o", tmp_path / "o.json")
    assert load_profile(tmp_path / "o.json").score_digest == scores.digest


def test_what_is_not_there_is_one_line(server, profile, tmp_path, monkeypatch):
    pushed(server, tmp_path / "p.json")
    for source, words in (
        (f"hf://{REPO}/q.json", "there is no such file in that repository"),
        (f"hf://{REPO}@nowhere/p.json", "the repository has no such revision"),
        ("hf://me/nothing/p.json", "there is no such repository on the hub"),
        (f"hf://{REPO}", f"name a file in it, such as hf://{REPO}/p.json"),
        ("hf://p.json", "write hf://owner/repo/file.json"),
        ("hf://buckets/me/store/p.json", "is a bucket, expected a repository of the hub"),
        (f"hf://{CLOSED}/p.json", "the hub does not give it to everyone"),
    ):
        assert words in refused(tmp_path / "no", "inspect", source)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="not in the local hub cache, and the hub cannot be reach"):
        load_profile(f"hf://{REPO}/p.json")


def test_a_hub_that_does_not_answer_is_asked_once(server, profile, tmp_path, monkeypatch):
    pushed(server, tmp_path / "p.json")
    load_profile(f"hf://{REPO}/p.json")
    server.shutdown()
    server.server_close()
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"would wait {seconds} s"))
    with pytest.raises(InputError, match="not in the local hub cache, and the hub cannot be reach"):
        load_profile(f"hf://{REPO}/q.json")
    assert load_profile(f"hf://{REPO}/p.json") == profile


def test_what_a_commit_names_is_not_asked_for_again(server, profile, tmp_path, monkeypatch):
    where = pushed(server, tmp_path / "p.json")
    load_profile(where)
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: pytest.fail("asks again"))
    assert load_profile(where) == profile


def test_a_changed_file_is_refused_by_its_name(server, profile, tmp_path):
    pushed(server, tmp_path / "p.json")
    files = next(iter(server.repos[REPO].values()))
    files["p.json"] = files["p.json"].replace(b"[40, 6]", b"[40, 7]")
    with pytest.raises(ProfileFileError, match=rf"^hf://{REPO}/p\.json: \w+ is"):
        load_profile(f"hf://{REPO}/p.json")
    with pytest.raises(ProfileFileError, match=rf"^hf://{REPO}/p\.json: file is a budget profile"):
        load_fitted(f"hf://{REPO}/p.json")


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match=r"kvalloc\[hub\]"):
        load_profile(f"hf://{REPO}/p.json")
