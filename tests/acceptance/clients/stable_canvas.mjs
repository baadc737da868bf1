// Runs a prompt with @stable-canvas/comfyui-client and prints what it concluded.
import { Client } from "@stable-canvas/comfyui-client";

const [url, prompt] = [new URL(process.argv[2]), JSON.parse(process.argv[3])];
const client = new Client({ api_host: url.host, WebSocket, fetch });
await client.connect();
let failure = null;
let images = [];
try {
  ({ images } = await client.enqueue(prompt));
} catch (error) {
  failure = String(error);
}
console.log(JSON.stringify({ failure, urls: images.map((image) => image.data) }));
process.exit(0);
