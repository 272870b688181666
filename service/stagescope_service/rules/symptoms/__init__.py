"""The symptoms of the doctor: YAML files, and the functions that find their evidence."""
