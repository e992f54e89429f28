"""Upstream: another OpenAI-compatible server as an engine of the chain. Open engine.py first."""

from edged.engine.upstream.engine import UpstreamEngine

__all__ = ["UpstreamEngine"]
