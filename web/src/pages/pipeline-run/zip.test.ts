import { describe, expect, it } from "vitest"
import type { PipelineRunAnswer } from "@/api/schema"
import { indexOf, type Part } from "./pack"
import { crc32, Zip } from "./zip"

const text = (value: string) => new TextEncoder().encode(value)

describe("a ZIP archive", () => {
  it("has an index with unrounded seeds", () => {
    const candidate = {
      id: "1",
      seed: 10696657397334761000,
      seed_text: "10696657397334761338",
      path: "a/b.png",
    }
    const index = indexOf({ id: "r" } as PipelineRunAnswer, [{ candidate, label: "" } as unknown as Part])
    expect(index).toContain('"seed": 10696657397334761338,')
    expect(JSON.parse(index).candidates[0]).toMatchObject({ id: "1", url: null, file: "a/b.png" })
  })

  it("has standard checksums", () => {
    expect(crc32(text("123456789"))).toBe(0xcbf43926)
    expect(crc32(new Uint8Array())).toBe(0)
  })

  it("contains the added files at the right offsets", async () => {
    const zip = new Zip()
    const at = new Date(2026, 4, 1, 12, 30, 10)
    await zip.add("base/schön.txt", "one", at)
    await zip.add("b.bin", new Blob([text("two!")]), at)
    const bytes = new Uint8Array(await zip.end().arrayBuffer())
    const view = new DataView(bytes.buffer)
    const end = bytes.length - 22
    expect(view.getUint32(end, true)).toBe(0x06054b50)
    expect(view.getUint16(end + 10, true)).toBe(2)
    const directory = view.getUint32(end + 16, true)
    expect(directory).toBe(zip.bytes)
    expect(view.getUint32(directory, true)).toBe(0x02014b50)
    const name = text("base/schön.txt")
    expect(view.getUint16(directory + 28, true)).toBe(name.length)
    const second = directory + 46 + name.length
    const place = view.getUint32(second + 42, true)
    expect(view.getUint32(place, true)).toBe(0x04034b50)
    expect(new TextDecoder().decode(bytes.slice(place + 30 + 5, place + 30 + 5 + 4))).toBe("two!")
    expect(view.getUint32(place + 14, true)).toBe(crc32(text("two!")))
  })
})
