"""OpenAI's API. A request reads: ``routes`` -> ``schema`` -> ``chat`` -> (server) -> ``stream`` -> ``answers``."""
