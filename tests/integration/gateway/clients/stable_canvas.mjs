// @stable-canvas/comfyui-client: node stable_canvas.mjs URL KEY PROMPT PHOTO RESULT
import { readFileSync, writeFileSync } from "node:fs";
import { Client } from "@stable-canvas/comfyui-client";

const [url, key, prompt, photo, result] = process.argv.slice(2);
// It knows no keys: its address has one, and its socket, which takes the address without its path, another.
class KeyedSocket extends WebSocket {
  constructor(address) {
    super(`${address}&token=${key}`);
  }
}
const client = new Client({
  api_host: new URL(url).host,
  api_base: `/k/${key}`,
  WebSocket: KeyedSocket,
  fetch,
});
await client.connect();
const form = new FormData();
form.append("image", new Blob([readFileSync(photo)], { type: "image/png" }), "photo.png");
const uploaded = await (await client.fetchApi("/upload/image", { method: "POST", body: form })).json();
const graph = JSON.parse(readFileSync(prompt));
graph["1"].inputs.image = uploaded.name;

const live = await client.enqueue(graph);
const polled = await client.enqueue_polling(graph, { polling_ms: 50, timeout_ms: 30000 });
const [picture] = live.images;
writeFileSync(result, Buffer.from(await (await fetch(picture.data)).arrayBuffer()));
const stats = await client.getSystemStats();
const queue = await client.getQueue();
const history = await client.getHistory();
console.log(
  JSON.stringify({
    pictures: live.images.map((each) => each.data),
    polled: polled.images.map((each) => each.data),
    version: stats.system.comfyui_version,
    queue,
    runs: history.History.length,
  }),
);
client.close();
process.exit(0);
