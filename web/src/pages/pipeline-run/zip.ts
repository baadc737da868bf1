/** Writes a ZIP archive without compression, because pictures are already compressed. Its parts
 * remain blobs, which browsers can keep on disk. */

const TABLE = Uint32Array.from({ length: 256 }, (_, index) => {
  let value = index
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1
  return value
})
/** Larger archives would require ZIP64, which not every program can read. */
export const BYTES_MAX = 0xffffffff - 64_000_000
export const FILES_MAX = 60_000
const UTF8_NAMES = 0x0800
const VERSION = 20

export function crc32(bytes: Uint8Array): number {
  let value = 0xffffffff
  for (const byte of bytes) value = (TABLE[(value ^ byte) & 0xff] ?? 0) ^ (value >>> 8)
  return (value ^ 0xffffffff) >>> 0
}

/** Returns the DOS date and time, which has a resolution of two seconds. */
function dosTime(at: Date): [time: number, date: number] {
  const time = (at.getHours() << 11) | (at.getMinutes() << 5) | (at.getSeconds() >> 1)
  return [time, (Math.max(0, at.getFullYear() - 1980) << 9) | ((at.getMonth() + 1) << 5) | at.getDate()]
}

function numbers(...fields: readonly (readonly [size: 2 | 4, value: number])[]): Uint8Array<ArrayBuffer> {
  const view = new DataView(new ArrayBuffer(fields.reduce((sum, [size]) => sum + size, 0)))
  let at = 0
  for (const [size, value] of fields) {
    if (size === 2) view.setUint16(at, value, true)
    else view.setUint32(at, value, true)
    at += size
  }
  return new Uint8Array(view.buffer)
}

export class Zip {
  private readonly parts: BlobPart[] = []
  private readonly directory: BlobPart[] = []
  private files = 0
  private size = 0
  private directorySize = 0

  get bytes(): number {
    return this.size
  }

  async add(path: string, content: Blob | string, at: Date): Promise<void> {
    const blob = typeof content === "string" ? new Blob([content]) : content
    const name = new TextEncoder().encode(path)
    const [time, date] = dosTime(at)
    const crc = crc32(new Uint8Array(await blob.arrayBuffer()))
    const alike = [
      [2, VERSION],
      [2, UTF8_NAMES],
      [2, 0],
      [2, time],
      [2, date],
      [4, crc],
      [4, blob.size],
      [4, blob.size],
      [2, name.length],
      [2, 0],
    ] as const
    const head = numbers([4, 0x04034b50], ...alike)
    this.parts.push(head, name, blob)
    const entry = numbers(
      [4, 0x02014b50],
      [2, VERSION],
      ...alike,
      [2, 0],
      [2, 0],
      [2, 0],
      [4, 0],
      [4, this.size],
    )
    this.directory.push(entry, name)
    this.directorySize += entry.length + name.length
    this.size += head.length + name.length + blob.size
    this.files += 1
  }

  end(): Blob {
    const last = numbers(
      [4, 0x06054b50],
      [2, 0],
      [2, 0],
      [2, this.files],
      [2, this.files],
      [4, this.directorySize],
      [4, this.size],
      [2, 0],
    )
    return new Blob([...this.parts, ...this.directory, last], { type: "application/zip" })
  }
}
