"""The bundled sample pipeline."""
