from tests.models.conftest import config, quick_compilation

__all__ = ["config", "quick_compilation"]
