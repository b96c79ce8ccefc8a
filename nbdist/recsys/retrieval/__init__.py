"""The items whose vectors go best with a query's: exactly, in blocks, or by FAISS; and an index of them to keep."""

from .index import ItemIndex
from .search import top_k

__all__ = ["ItemIndex", "top_k"]
