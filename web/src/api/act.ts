/** Runs a component's changes one at a time. An error is kept until the next attempt. */

import { useCallback, useRef, useState } from "react"
import { type ApiError, asApiError } from "./errors"

export interface Act<Args extends unknown[], Result> {
  /** Returns undefined if an earlier call is still running, or if the call fails. `error` then
   * contains the failure. */
  readonly run: (...args: Args) => Promise<Result | undefined>
  readonly isRunning: boolean
  readonly error: ApiError | null
  readonly forget: () => void
}

export function useAct<Args extends unknown[], Result>(
  act: (...args: Args) => Promise<Result>,
): Act<Args, Result> {
  const [state, setState] = useState<{ isRunning: boolean; error: ApiError | null }>({
    isRunning: false,
    error: null,
  })
  const latest = useRef(act)
  latest.current = act
  const running = useRef(false)
  const run = useCallback(async (...args: Args) => {
    if (running.current) return undefined
    running.current = true
    setState({ isRunning: true, error: null })
    try {
      const result = await latest.current(...args)
      setState({ isRunning: false, error: null })
      return result
    } catch (thrown) {
      setState({ isRunning: false, error: asApiError(thrown) })
      return undefined
    } finally {
      running.current = false
    }
  }, [])
  const forget = useCallback(() => setState({ isRunning: false, error: null }), [])
  return { run, forget, ...state }
}
