"""What runs inside vLLM's own processes. This folder, and nothing else of areal-mega, is put on the PYTHONPATH of a vLLM server."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
EXTENSION = "areal_mega_vllm.Extension"
BACKEND = "areal_mega"
"""Name of the plug-in's engine in vLLM's weight transfer."""
