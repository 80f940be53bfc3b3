"""Published LightningLM checkpoints: from their layout of keys and files into our folder and back, bit for bit."""

from lightninglm.checkpoint.published.configuration import resolve_config
from lightninglm.checkpoint.published.exporting import ExportMismatchError, ExportReport, export_published
from lightninglm.checkpoint.published.importing import ImportReport, import_published
from lightninglm.checkpoint.published.keys import Entry, Variant, alias_keys, canonical_key, published_table
from lightninglm.checkpoint.published.source import PublishedSource

__all__ = [
    "Entry",
    "ExportMismatchError",
    "ExportReport",
    "ImportReport",
    "PublishedSource",
    "Variant",
    "alias_keys",
    "canonical_key",
    "export_published",
    "import_published",
    "published_table",
    "resolve_config",
]
