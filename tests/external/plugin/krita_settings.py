"""A pytest plugin for krita-ai-diffusion: its client also connects to servers without all models and custom nodes."""

from ai_diffusion.settings import settings


def pytest_collection_finish() -> None:
    settings.check_server_resources = False
