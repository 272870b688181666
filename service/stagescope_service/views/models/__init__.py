"""The bodies of requests and answers as pydantic models.

`bodies` validates requests. The other models only describe answers in the OpenAPI document: a route
returns its body as it is (`requests.Answer`), so that no answer waits for a model. Tests check
every answer against its model, which forbids fields that it does not name.
"""
