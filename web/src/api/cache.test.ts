import { afterEach, expect, test, vi } from "vitest"
import { Cache } from "./cache"
import { ApiError } from "./errors"

afterEach(() => {
  vi.useRealTimers()
})

const nothing = () => undefined

test("old data remains while new data is loading and after a failure", async () => {
  vi.useFakeTimers()
  const cache = new Cache()
  let fails = false
  const read = () => (fails ? Promise.reject(new ApiError("unavailable", "", 503)) : Promise.resolve("old"))
  cache.watch("/a", read, nothing)
  await vi.waitFor(() => expect(cache.entry("/a").data).toBe("old"))
  fails = true
  const reloading = cache.reload("/a")
  expect(cache.entry("/a")).toMatchObject({ data: "old", isLoading: true })
  await reloading
  expect(cache.entry("/a")).toMatchObject({ data: "old", isLoading: false })
  expect(cache.entry("/a").error?.code).toBe("unavailable")
  fails = false
  await vi.advanceTimersByTimeAsync(1_000)
  expect(cache.entry("/a").error).toBeNull()
})

test("permanent errors are not retried", async () => {
  vi.useFakeTimers()
  const read = vi.fn(() => Promise.reject(new ApiError("not_found", "", 404)))
  new Cache().watch("/a", read, nothing)
  await vi.advanceTimersByTimeAsync(120_000)
  expect(read).toHaveBeenCalledTimes(1)
})

test("two listeners of the same key share one read", async () => {
  const cache = new Cache()
  const read = vi.fn(() => Promise.resolve(1))
  cache.watch("/a", read, nothing)
  cache.watch("/a", read, nothing)
  await vi.waitFor(() => expect(cache.entry("/a").data).toBe(1))
  expect(read).toHaveBeenCalledTimes(1)
})

test("fresh data is not read again, but invalidated data with listeners is", async () => {
  const cache = new Cache()
  const read = vi.fn(() => Promise.resolve(1))
  const leave = cache.watch("/a?x=1", read, nothing, 60)
  await vi.waitFor(() => expect(cache.entry("/a?x=1").data).toBe(1))
  leave()
  const leaveAgain = cache.watch("/a?x=1", read, nothing, 60)
  expect(read).toHaveBeenCalledTimes(1)
  cache.invalidate("/a")
  expect(read).toHaveBeenCalledTimes(2)
  leaveAgain()
  cache.invalidate("/a")
  expect(read).toHaveBeenCalledTimes(2)
})

test("removed listeners are not notified", async () => {
  const cache = new Cache()
  const listener = vi.fn()
  let answer: (value: string) => void = nothing
  const leave = cache.watch("/a", () => new Promise<string>((done) => (answer = done)), listener)
  listener.mockClear()
  leave()
  answer("late")
  await Promise.resolve()
  expect(listener).not.toHaveBeenCalled()
  expect(cache.entry("/a").data).toBeUndefined()
})

test("the number of entries is limited", async () => {
  const cache = new Cache()
  for (let index = 0; index < 500; index += 1)
    cache.watch(`/${index}`, () => Promise.resolve(index), nothing)()
  const cached = Array.from({ length: 500 }, (_, index) => index).filter((index) =>
    (cache as unknown as { slots: Map<string, unknown> }).slots.has(`/${index}`),
  )
  expect(cached.length).toBeLessThanOrEqual(200)
})

test("primed data is used by the first listener", async () => {
  const cache = new Cache()
  const read = vi.fn(() => Promise.resolve(1))
  await cache.prime("/a", read)
  cache.watch("/a", read, nothing)()
  expect(read).toHaveBeenCalledTimes(1)
  cache.watch("/a", read, nothing)
  expect(read).toHaveBeenCalledTimes(2)
})

test("a failed prime is not retried until there is a listener", async () => {
  vi.useFakeTimers()
  const cache = new Cache()
  const read = vi.fn(() => Promise.reject(new ApiError("unavailable", "", 503)))
  await cache.prime("/a", read)
  await vi.advanceTimersByTimeAsync(120_000)
  expect(read).toHaveBeenCalledTimes(1)
  cache.watch("/a", read, nothing)
  expect(read).toHaveBeenCalledTimes(2)
})
