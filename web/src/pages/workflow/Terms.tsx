/** Settings for all versions of a workflow: its time limit, who may run it, and its price in
 * graphs. */

import { type FormEvent, useState } from "react"
import { api, cache, useAct } from "@/api"
import type { TermsBody, WorkflowDetail } from "@/api/schema"
import { Button, Check, Dialog, ErrorNote, Field, toast } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/workflows"

interface TermsProps {
  workflow: WorkflowDetail
  path: string
  onClose: () => void
}

export function Terms({ workflow, path, onClose }: TermsProps) {
  const [limit, setLimit] = useState(String(workflow.run_limit_seconds))
  const [capabilities, setCapabilities] = useState(workflow.required_capabilities.join(", "))
  const [isOffered, setOffered] = useState(workflow.price_tokens !== null)
  const [price, setPrice] = useState(String(workflow.price_tokens ?? 1))
  const badLimit = isWhole(limit, 1) ? null : words.badLimit
  const badPrice = !isOffered || isWhole(price, 0) ? null : words.badPrice
  const save = useAct(async () => {
    const body: TermsBody = {
      run_limit_seconds: Number(limit),
      required_capabilities: capabilities
        .split(",")
        .map((capability) => capability.trim())
        .filter(Boolean),
      ...(isOffered ? { price_tokens: Number(price) } : { is_withdrawn: workflow.price_tokens !== null }),
    }
    await api.patch(path, body)
    cache.invalidate("/api/admin/workflows")
    toast({ title: words.termsSaved(workflow.slug) })
    onClose()
  })
  const submit = (event: FormEvent) => {
    event.preventDefault()
    if (!badLimit && !badPrice) void save.run()
  }
  return (
    <Dialog open onClose={onClose} title={words.termsTitle(workflow.slug)}>
      <form className="stack" onSubmit={submit} noValidate>
        <Field
          label={words.limit}
          type="number"
          inputMode="numeric"
          min={1}
          value={limit}
          error={badLimit}
          onChange={(event) => setLimit(event.target.value)}
        />
        <Field
          label={words.capabilities}
          hint={words.capabilitiesHint}
          value={capabilities}
          onChange={(event) => setCapabilities(event.target.value)}
        />
        <Check
          label={words.offered}
          checked={isOffered}
          onChange={(event) => setOffered(event.target.checked)}
        />
        {isOffered && (
          <Field
            label={words.offeredPrice}
            type="number"
            inputMode="numeric"
            min={0}
            value={price}
            error={badPrice}
            onChange={(event) => setPrice(event.target.value)}
          />
        )}
        {save.error && <ErrorNote error={save.error} />}
        <div className="dialog-actions">
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" busy={save.isRunning} offReason={badLimit ?? badPrice}>
            {common.save}
          </Button>
        </div>
      </form>
    </Dialog>
  )
}

function isWhole(text: string, least: number): boolean {
  return text.trim() !== "" && Number.isInteger(Number(text)) && Number(text) >= least
}
