// @saintno/comfyui-sdk: node saintno.mjs URL KEY PROMPT PHOTO RESULT
import { readFileSync, writeFileSync } from "node:fs";
import { CallWrapper, ComfyApi, PromptBuilder } from "@saintno/comfyui-sdk";

const [url, token, prompt, photo, result] = process.argv.slice(2);
const api = new ComfyApi(url, undefined, { credentials: { type: "bearer_token", token } }).init();
await api.waitForReady();
const uploaded = await api.uploadImage(readFileSync(photo), "photo.png");
const workflow = new PromptBuilder(JSON.parse(readFileSync(prompt)), ["image"], ["steps", "pictures"])
  .setInputNode("image", "1.inputs.image")
  .setOutputNode("steps", "2")
  .setOutputNode("pictures", "4")
  .input("image", uploaded.info.filename);

const told = [];
const output = await new CallWrapper(api, workflow)
  .onPending(() => told.push("pending"))
  .onStart(() => told.push("start"))
  .onProgress(() => told.push("progress"))
  .onPreview(() => told.push("preview"))
  .onOutput(() => told.push("output"))
  .onFinished(() => told.push("finished"))
  .onFailed((error) => told.push(`failed ${error.message}`))
  .run();
const [picture] = output.pictures.images;
writeFileSync(result, Buffer.from(await (await api.getImage(picture)).arrayBuffer()));
const queue = await api.getQueue();
const nodes = Object.keys(await api.getNodeDefs()).length;
console.log(JSON.stringify({ told, picture, queue, nodes }));
api.destroy();
process.exit(0);
