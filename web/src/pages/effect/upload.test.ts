import { expect, test } from "vitest"
import { ApiError } from "@/api"
import type { UploadPart } from "@/api/schema"
import { FileUpload, type Transport } from "./upload"

const SLOT = { method: "PUT", url: "/objects/a", headers: {} }
const LOST = new ApiError("offline", "lost", 0)

function part(number: number, isThere = false): UploadPart {
  return { number, start: (number - 1) * 4, size: 4, upload: isThere ? null : { ...SLOT, url: `/${number}` } }
}

/** A store that loses the connection `losses[n]` times for part n. */
function store(losses: Record<number, number>, change: Partial<Transport> = {}) {
  const storedParts = new Set<number>()
  const calls: string[] = []
  const transport: Transport = {
    announce: async () => ({
      file_id: "f",
      file: null,
      upload: SLOT,
      parts: [part(1), part(2), part(3)],
      expires_at: "",
    }),
    state: async () => ({
      file_id: "f",
      size: 12,
      received_bytes: 0,
      is_whole: false,
      parts: [1, 2, 3].map((number) => part(number, storedParts.has(number))),
      expires_at: "",
    }),
    put: async (slot, data, tell) => {
      const number = Number(slot.url.slice(1))
      calls.push(`${number}:${data.size}`)
      tell(data.size / 2)
      const remaining = losses[number] ?? 0
      losses[number] = remaining - 1
      if (remaining > 0) throw LOST
      storedParts.add(number)
    },
    link: async () => ({ id: "media" }) as never,
    wait: async () => undefined,
    ...change,
  }
  return { transport, calls }
}

const FILE = new File(["0123456789ab"], "cat.png", { type: "image/png" })

test("after a lost connection, uploaded parts aren't sent again", async () => {
  const { transport, calls } = store({ 2: 2 })
  const upload = new FileUpload(FILE, null, transport)
  const phases = new Set<string>()
  upload.subscribe(() => phases.add(upload.state().phase))
  expect(await upload.ended).toBe("media")
  expect(calls).toEqual(["1:4", "2:4", "2:4", "2:4", "3:4"])
  expect([...phases]).toEqual(["sending", "paused", "linking", "done"])
  expect(upload.state().sentBytes).toBe(12)
})

test("a refusal ends the upload with a reason", async () => {
  const refuse = async () => {
    throw new ApiError("storage_full", "the storage is full", 422)
  }
  const upload = new FileUpload(FILE, null, store({}, { announce: refuse }).transport)
  expect(await upload.ended).toBeNull()
  expect(upload.state()).toMatchObject({ phase: "failed", error: { code: "storage_full" } })
})

test("expired URLs are requested again, but only a few times", async () => {
  let refused = 0
  const put = async () => {
    refused += 1
    throw new ApiError("store_refused", "expired", 403)
  }
  const upload = new FileUpload(FILE, null, store({}, { put }).transport)
  expect(await upload.ended).toBeNull()
  expect(refused).toBe(4)
})

test("a stopped upload reports nothing more", async () => {
  const upload: FileUpload = new FileUpload(
    FILE,
    null,
    store({}, { put: async () => upload.stop() }).transport,
  )
  expect(await upload.ended).toBeNull()
  expect(upload.state().phase).not.toBe("failed")
})
