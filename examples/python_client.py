"""Softens a photo with the API: python examples/python_client.py PHOTO FOLDER

COMFYFLEET_URL is the address of the control plane, and COMFYFLEET_KEY is a customer's key. The
control plane must offer the effect `soften`, which docs/quickstart.md sets up.
"""

import asyncio
import os
import sys
from pathlib import Path

from comfyfleet.client import Client
from comfyfleet.errors import InsufficientTokens, RunFailed


async def soften(client: Client, photo: Path, folder: Path) -> list[Path]:
    media = await client.upload(photo, effect="soften")
    handle = await client.apply("soften", media)
    await handle.wait(timeout_seconds=600)
    return await handle.download(folder)


async def main(photo: Path, folder: Path) -> None:
    async with Client(os.environ["COMFYFLEET_URL"], os.environ["COMFYFLEET_KEY"]) as client:
        print((await client.wallet()).balance, "tokens")
        try:
            print(*await soften(client, photo, folder), sep="\n")
        except InsufficientTokens as error:
            sys.exit(f"it costs {error.details['required_tokens']} tokens")
        except RunFailed as error:
            sys.exit(error.message)
        print((await client.wallet()).balance, "tokens")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
