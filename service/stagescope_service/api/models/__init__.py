"""What routes answer, as pydantic models: they make the document, and never run for an answer.

A route hands its body over as it is (`requests.Answer`), so that no answer waits for a model;
`response_model=` puts the model into /openapi.json. Tests hold every answer to its model, which
forbids fields that it does not name.
"""
