/** Runs changes for components, one at a time. An error remains until the next attempt. */

import { useCallback, useRef, useState } from "react"
import { type ApiError, asApiError } from "./errors"

export interface Act<Given extends unknown[], Result> {
  /** Returns undefined after a failure, which is in `error`, or if an earlier call is still
   * running. */
  readonly run: (...given: Given) => Promise<Result | undefined>
  readonly isRunning: boolean
  readonly error: ApiError | null
  readonly forget: () => void
}

export function useAct<Given extends unknown[], Result>(
  act: (...given: Given) => Promise<Result>,
): Act<Given, Result> {
  const [state, setState] = useState<{ isRunning: boolean; error: ApiError | null }>({
    isRunning: false,
    error: null,
  })
  const latest = useRef(act)
  latest.current = act
  const running = useRef(false)
  const run = useCallback(async (...given: Given) => {
    if (running.current) return undefined
    running.current = true
    setState({ isRunning: true, error: null })
    try {
      const result = await latest.current(...given)
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
