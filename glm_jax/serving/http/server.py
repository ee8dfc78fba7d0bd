"""Runs the application until it is told to stop, then drains it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable

import fastapi
import uvicorn

_LAST_SECONDS = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
  """A server whose end is graceful, and is its own: no signal is re-raised.

  The first SIGTERM or SIGINT closes the port and lets running requests
  finish; the second one, or `drain_seconds`, aborts them.

  Attributes:
    url: where it listens, once it does.
  """

  def __init__(
    self,
    app: fastapi.FastAPI,
    *,
    host: str,
    port: int,
    drain_seconds: float,
    on_started: Callable[[str], None] | None = None,
  ):
    """Prepares `app`; port 0 takes a free one. `on_started` gets the URL."""
    config = uvicorn.Config(
      app,
      host=host,
      port=port,
      log_config=None,
      access_log=False,
      server_header=False,
      lifespan='on',
      timeout_keep_alive=75,
      timeout_graceful_shutdown=drain_seconds,
      backlog=4096,
    )
    super().__init__(config)
    self._service = app.state.service
    self._on_started = on_started
    self.url = ''

  async def startup(self, sockets=None):
    """Opens the port."""
    await super().startup(sockets)
    host, port = self.servers[0].sockets[0].getsockname()[:2]
    self.url = (
      f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'
    )
    if self._on_started is not None:
      self._on_started(self.url)

  async def on_tick(self, counter: int) -> bool:
    """Says whether to end; without an engine there is nothing to serve."""
    return await super().on_tick(counter) or not self._service.alive

  async def shutdown(self, sockets=None):
    """Closes the port, drains, and waits for what it had to cancel."""
    await super().shutdown(sockets)
    tasks = set(self.server_state.tasks)
    if tasks:
      await asyncio.wait(tasks, timeout=_LAST_SECONDS)

  def handle_exit(self, sig, frame):
    """Begins to drain; a second signal ends at once."""
    self._service.draining = True
    self.force_exit = self.should_exit
    self.should_exit = True

  @contextlib.contextmanager
  def capture_signals(self):
    """Handles signals while the server runs, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    before = {s: signal.signal(s, self.handle_exit) for s in _SIGNALS}
    try:
      yield
    finally:
      for sig, handler in before.items():
        signal.signal(sig, handler)
