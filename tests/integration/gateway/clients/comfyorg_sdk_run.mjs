// A run with @comfyorg/sdk: an upload, a job with its events, outputs, a cancelled job, and errors.
// Prints what it saw.
import { pathToFileURL } from "node:url";

const [sdk, photo, to, slow] = process.argv.slice(2);
const { Comfy, ComfyError } = await import(pathToFileURL(sdk).href);
const client = new Comfy({ apiKey: process.env.COMFY_API_KEY });
const seen = {};

const asset = client.assets.fromFile(photo);
const workflow = client.workflows.fromJson({
  1: { class_type: "LoadImage", inputs: {} },
  9: { class_type: "SaveImage", inputs: { images: ["1", 0], filename_prefix: "sdk" } },
});
workflow.setInput("1", "image", asset);
const job = await client.submit(workflow);
seen.events = [];
seen.values = [];
for await (const event of job.events()) {
  seen.events.push(event.kind);
  if (event.kind === "progress") seen.values.push(event.value);
  if (event.kind === "outputReady") {
    seen.ready = Buffer.from(await event.output.toBytes()).toString("hex").slice(0, 8);
  }
}
await job.result();
seen.status = job.status;
seen.names = job.getOutputs("9").map((each) => each.name);
await job.getOutputs("9")[0].toFile(to);
seen.part = Buffer.from(await job.outputs[0].toBytes({ range: [1, 3] })).toString();
seen.url = (await job.outputs[0].getDownloadUrl()).url;
seen.format = (await job.getWorkflow()).format;
const again = client.assets.fromFile(photo);
await again.commit();
seen.deduplicated = [again.id === asset.id, again.createdNew];
seen.made_by = (await client.assets.get(job.outputs[0].id)).jobId === job.id;

const long = await client.submit(client.workflows.fromJson(JSON.parse(slow)));
seen.cancelled = (await (await long.cancel()).wait(20_000)).status;
const idempotencyKey = "once-only";
await (await client.submit(workflow, { idempotencyKey })).wait(30_000);
const none = "00000000-0000-4000-8000-000000000000";
const calls = {
  reused: () => client.submit(workflow, { idempotencyKey }),
  invalid: () => client.submit(client.workflows.fromJson({ 1: { class_type: "No" } })),
  missing: () => client.jobs.get(none),
  no_asset: () => client.assets.get(none),
  key: () => new Comfy({ apiKey: "cf_wrong" }).jobs.get("x"),
};
for (const [name, call] of Object.entries(calls)) {
  try {
    await call();
  } catch (error) {
    if (!(error instanceof ComfyError)) throw error;
    seen[name] = [error.constructor.name, error.code, error.httpStatus];
  }
}
await asset.delete();
console.log(JSON.stringify(seen));
