"""What all tables of tenant pools belong to, wherever they are written down."""

from sqlalchemy import MetaData

from comfyfleet.db.central import NAMES

tenant = MetaData(naming_convention=NAMES)
