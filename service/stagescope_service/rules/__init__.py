"""Rules on what a run reports: facts, conditions, evidence, actions; no side effects.

A trigger's rule compares each step that closes with the steps before it, and its actions follow. A
symptom of the doctor looks at the history of a run on request.
"""
