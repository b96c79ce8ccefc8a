"""Search for the items with the largest products with a query: exact, in blocks, or with FAISS; and a saved index."""

from .index import ItemIndex
from .search import top_k

__all__ = ["ItemIndex", "top_k"]
