"""Who may ask: hosts, origins, keys, sockets. Foreign web pages may not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fakes_http import Site, chat_body, connected, serving

from edged.errors import ConfigError, RequestError
from edged.ingress.http import ListenError
from edged.ingress.http.guard import Guard, is_local
from edged.ingress.http.keys import ApiKeys
from edged.settings import Http

CHAT = "/v1/chat/completions"
KIOSK = "https://kiosk.example.com"


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    hosts = {"allowed_hosts": ("board.lan",), "allowed_origins": (KIOSK,)}
    async with serving(tmp_path, **hosts) as site:
        yield site


async def ask(
    site: Site, method: str = "POST", path: str = CHAT, unix: bool = False, **headers: str
) -> tuple[int, dict[str, str], Any]:
    connector = aiohttp.UnixConnector(str(site.unix_socket)) if unix else None
    async with aiohttp.ClientSession(connector=connector) as session:
        body = json.dumps(chat_body()).encode() if method == "POST" else None
        if method == "POST":
            headers.setdefault("Content-Type", "application/json")
        answer = await session.request(method, site.url + path, data=body, headers=headers)
        text = await answer.text()
        return answer.status, dict(answer.headers), json.loads(text) if text[:1] == "{" else text


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8090", "127.0.0.1:1", "[::1]:8090", "node-1", "board.lan:8090"],
)
async def test_known_hosts_are_served(site: Site, host: str) -> None:
    """Loopback names, the node's own name and the configured ones, with any port."""
    assert (await ask(site, Host=host))[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "a b"]
)
async def test_other_hosts_are_refused(site: Site, host: str) -> None:
    """A name that somebody else's DNS may point at us is 403 (DNS rebinding)."""
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics")):
        status, _, answer = await ask(site, method, path, Host=host)
        assert (status, answer["error"]["code"]) == (403, "forbidden")
    assert (await ask(site))[0] == 200


async def test_a_request_without_a_host_is_refused(site: Site) -> None:
    """HTTP/1.0 without Host, or with two of them, is not served."""
    for head in (b"", b"Host: localhost\r\nHost: evil\r\n"):
        async with connected(site) as raw:
            raw.writer.write(b"GET /v1/models HTTP/1.0\r\n" + head + b"\r\n")
            assert (await raw.answer())[0] in (400, 403)


def test_the_address_a_client_has_connected_to_is_a_host() -> None:
    """On 0.0.0.0 the board's own address works without being listed; other addresses do not."""
    guard = Guard(Http(host="0.0.0.0", api_keys_file="k"), "node-1")
    guard.check_host(["192.168.1.5:8090"], "192.168.1.5")
    guard.check_host(["[fe80::1]:8090"], "fe80::1")
    with pytest.raises(RequestError):
        guard.check_host(["192.168.1.6:8090"], "192.168.1.5")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    ],
)
@pytest.mark.parametrize("unix", [False, True])
async def test_foreign_pages_are_refused(site: Site, headers: dict[str, str], unix: bool) -> None:
    """A page of another origin gets 403 and no cross-origin headers, on every socket."""
    status, answered, answer = await ask(site, unix=unix, **headers)

    assert (status, answer["error"]["code"]) == (403, "forbidden")
    assert "Access-Control-Allow-Origin" not in answered
    assert site.scheduler.submitted == []


async def test_our_own_page_and_allowed_pages_are_served(site: Site) -> None:
    """Same origin needs nothing; an allowed origin gets its own name back, never a star."""
    own = f"http://127.0.0.1:{site.server.port}"
    status, answered, _ = await ask(site, Origin=own)
    assert status == 200 and "Access-Control-Allow-Origin" not in answered

    status, answered, _ = await ask(site, Origin=KIOSK, **{"Sec-Fetch-Site": "cross-site"})
    assert status == 200
    assert answered["Access-Control-Allow-Origin"] == KIOSK and answered["Vary"] == "Origin"
    assert "x-request-id" in answered["Access-Control-Expose-Headers"]


async def test_errors_and_streams_carry_cross_origin_headers(site: Site) -> None:
    """A page can read why it was refused, and can read a stream."""
    _, answered, _ = await ask(site, "GET", "/v1/models/none", Origin=KIOSK)
    assert answered["Access-Control-Allow-Origin"] == KIOSK
    async with aiohttp.ClientSession() as session:
        body = chat_body(stream=True)
        answer = await session.post(site.url + CHAT, json=body, headers={"Origin": KIOSK})
        assert answer.headers["Access-Control-Allow-Origin"] == KIOSK


async def test_a_link_from_elsewhere_may_be_followed(site: Site) -> None:
    """A user who clicks a link to the board sees it; a frame or a script does not."""
    follow = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert (await ask(site, "GET", "/", **follow, **{"Sec-Fetch-Dest": "document"}))[0] == 200
    assert (await ask(site, "GET", "/", **follow, **{"Sec-Fetch-Dest": "iframe"}))[0] == 403


async def test_a_preflight_is_answered_for_allowed_pages_only(site: Site) -> None:
    """204 with the exact origin and the asked headers; 403 for others; 405 when it is none."""
    asking = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    status, answered, _ = await ask(site, "OPTIONS", Origin=KIOSK, **asking)
    assert status == 204 and answered["Access-Control-Allow-Origin"] == KIOSK
    assert answered["Access-Control-Allow-Headers"] == asking["Access-Control-Request-Headers"]
    assert answered["Access-Control-Max-Age"] == "600"
    assert (await ask(site, "OPTIONS", Origin="https://evil.example", **asking))[0] == 403
    assert (await ask(site, "OPTIONS"))[0] == 405


async def test_405_tells_what_is_allowed(site: Site) -> None:
    """The wrong method is an error object with an Allow header."""
    status, answered, answer = await ask(site, "GET", CHAT)

    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert answered["Allow"] == "POST"


# --- keys ---------------------------------------------------------------------------------------


def key_file(folder: Path, *lines: str) -> str:
    path = folder / "keys"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def line(name: str, key: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}"


@pytest_asyncio.fixture
async def locked(tmp_path: Path) -> AsyncIterator[Site]:
    keys = key_file(tmp_path, "# people", line("ann", "sesame"), "", line("bob", "geheim"))
    async with serving(tmp_path, api_keys_file=keys) as site:
        yield site


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", "Basic sesame", "sesame", "Bearer \xe9"]
)
async def test_without_a_valid_key_nothing_is_told(locked: Site, given: str | None) -> None:
    """401 with WWW-Authenticate for every route but health, before the body is read."""
    headers = {} if given is None else {"Authorization": given}
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/edged/v1/status")):
        status, answered, answer = await ask(locked, method, path, **headers)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert answered["WWW-Authenticate"] == "Bearer"
    assert locked.scheduler.submitted == []


async def test_a_valid_key_names_the_client(locked: Site) -> None:
    """Fair share and logs use the key's name; each key is its own client."""
    for key in ("sesame", "geheim"):
        assert (await ask(locked, Authorization=f"Bearer {key}"))[0] == 200

    assert [s.request.client for s in locked.scheduler.submitted] == ["ann", "bob"]


async def test_health_and_local_metrics_need_no_key(locked: Site) -> None:
    """Probes work without a key, and so do metrics from the machine itself."""
    for path in ("/", "/livez", "/readyz", "/health", "/metrics"):
        assert (await ask(locked, "GET", path))[0] == 200


async def test_the_unix_socket_needs_no_key_and_knows_its_user(locked: Site) -> None:
    """File permissions are the key there; the client is the user the kernel names."""
    assert (await ask(locked, unix=True, Host="anything.example"))[0] == 200
    assert locked.scheduler.submitted[0].request.client == "unix:0"


async def test_without_a_key_file_any_key_will_do(site: Site) -> None:
    """Clients that insist on sending a key work on an open loopback node."""
    assert (await ask(site, Authorization="Bearer sk-0000"))[0] == 200
    assert site.scheduler.submitted[0].request.client == "127.0.0.1"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("ann:nothex",), "line 1"),
        (("# only a comment",), "holds no key"),
        ((line("a", "x"), line("a", "y")), "line 2"),
        (("a b:" + "0" * 64,), "line 1"),
    ],
)
def test_a_bad_key_file_names_its_line(tmp_path: Path, lines: tuple[str, ...], says: str) -> None:
    """A key file that cannot be used is a configuration error with the next step."""
    with pytest.raises(ConfigError, match=says):
        ApiKeys.load(key_file(tmp_path, *lines))


def test_a_missing_key_file_is_a_configuration_error(tmp_path: Path) -> None:
    """Never open by accident: no file, no start."""
    with pytest.raises(ConfigError, match=r"http\.api_keys_file"):
        ApiKeys.load(str(tmp_path / "none"))


# --- sockets ------------------------------------------------------------------------------------


async def test_the_unix_socket_is_for_its_group_and_goes_at_the_end(tmp_path: Path) -> None:
    """Mode 0660 from the first moment; the file is gone after stop."""
    async with serving(tmp_path) as site:
        assert stat.S_IMODE(site.unix_socket.stat().st_mode) == 0o660
        path = site.unix_socket
    assert not path.exists()


async def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    """What a killed daemon left behind does not stop the next one."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "api.sock"))
    async with serving(tmp_path) as site:
        assert (await ask(site, unix=True))[0] == 200


async def test_a_live_socket_is_not_taken_over(tmp_path: Path) -> None:
    """A second daemon on the same socket says so and leaves the first one alone."""
    async with serving(tmp_path) as site:
        with pytest.raises(ListenError, match="another server answers"):
            async with serving(tmp_path):
                pass
        assert (await ask(site, unix=True))[0] == 200


async def test_a_file_in_the_sockets_place_is_kept(tmp_path: Path) -> None:
    """Never delete what is no socket."""
    (tmp_path / "api.sock").write_text("precious")
    with pytest.raises(ListenError, match="is no socket"):
        async with serving(tmp_path):
            pass
    assert (tmp_path / "api.sock").read_text() == "precious"


async def test_a_path_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    """The kernel allows 107 bytes; the error names the key."""
    with pytest.raises(ListenError, match=r"http\.unix_socket"):
        async with serving(tmp_path / ("x" * 120)):
            pass


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    """The message has the port and the next step; nothing is left listening."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use"):
            async with serving(tmp_path, port=port):
                pass
    assert not (tmp_path / "api.sock").exists()


async def test_an_unknown_address_is_a_clear_error(tmp_path: Path) -> None:
    """A host that is not ours names the key to change."""
    with pytest.raises(ListenError, match=r"http\.host"):
        async with serving(tmp_path, host="192.0.2.1"):
            pass


async def test_stop_may_be_called_twice(tmp_path: Path) -> None:
    """The second stop does nothing."""
    async with serving(tmp_path) as site:
        await site.server.stop()
        await asyncio.wait_for(site.server.stop(), 5)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("", True),
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("192.168.1.5", False),
        ("12.7.0.1", False),
        ("fe80::1", False),
        ("unknown", False),
    ],
)
def test_metrics_without_a_key_are_for_this_machine_only(address: str, local: bool) -> None:
    """Loopback in every spelling is local, everything else is not."""
    assert is_local(address) is local
