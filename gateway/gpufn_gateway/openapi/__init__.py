"""The OpenAPI document of a gateway."""
