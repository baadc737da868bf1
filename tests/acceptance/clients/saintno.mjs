// Runs a prompt with @saintno/comfyui-sdk and prints what it concluded.
import { CallWrapper, ComfyApi, PromptBuilder } from "@saintno/comfyui-sdk";

const [url, prompt] = [process.argv[2], JSON.parse(process.argv[3])];
const api = await new ComfyApi(url).init().waitForReady();
const builder = new PromptBuilder(prompt, [], ["images"]).setOutputNode("images", "9");
let failure = null;
const result = await new CallWrapper(api, builder)
  .onFailed((error) => { failure = String(error); })
  .run();
const files = result ? result.images.images : [];
console.log(JSON.stringify({ failure, urls: files.map((file) => api.getPathImage(file)) }));
process.exit(0);
