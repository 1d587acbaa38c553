"""The recorded program: values, specs, schemas, tape and programs."""
