from tests.data.conftest import write_documents

__all__ = ["write_documents"]
