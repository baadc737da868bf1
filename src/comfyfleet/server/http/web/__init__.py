"""Serves the web app, which is built from web/.

Internal: may change without notice.
"""

from comfyfleet.server.http.web.pages import WebPages as WebPages
from comfyfleet.server.http.web.pages import no_route as no_route
from comfyfleet.server.http.web.pages import web_routes as web_routes
