"""HTTP: the app, authentication, errors, the event stream and the routes, which call views."""
