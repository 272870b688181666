from tests.support.service_fixtures import compiled, live

__all__ = ["compiled", "live"]
