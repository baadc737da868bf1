/** Raw details: the full error, the prompt as a tree and as JSON, the request, and the audit
 * log. */

import { useState } from "react"
import { useQuery } from "@/api"
import type { JobDetails, SettingsAnswer } from "@/api/schema"
import { Button, Choices, Code, Panel, saveFile, Tabs } from "@/ui"
import { JsonTree } from "@/ui/JsonTree"
import { words } from "@/words/en/job"
import { readError } from "./rawError"

type Shown = "error" | "prompt" | "attempts" | "audit"

export function Details({ job }: { job: JobDetails }) {
  const [shown, setShown] = useState<Shown>(job.raw_error || job.error ? "error" : "prompt")
  const sent = job.attempts.filter((attempt) => attempt.prompt !== null)
  return (
    <Panel className="job-details">
      <Tabs
        label={words.details}
        value={shown}
        onChange={setShown}
        tabs={[
          { key: "error", title: words.tabs.error },
          { key: "prompt", title: words.tabs.prompt },
          { key: "attempts", title: words.tabs.attempts, count: sent.length || undefined },
          { key: "audit", title: words.tabs.audit },
        ]}
      >
        {shown === "error" && <WholeError job={job} />}
        {shown === "prompt" && <Prompt prompt={job.prompt} id={job.id} />}
        {shown === "attempts" && (
          <>
            {sent.length === 0 && <p className="job-none">{words.notSent}</p>}
            {sent.map((attempt) => (
              <section key={attempt.lease_number}>
                <h3>{words.attempt(attempt.attempt)}</h3>
                <JsonTree value={attempt.prompt} />
              </section>
            ))}
          </>
        )}
        {shown === "audit" && <JsonTree value={job.audit} openLevels={2} />}
      </Tabs>
    </Panel>
  )
}

function WholeError({ job }: { job: JobDetails }) {
  const text = job.raw_error ?? job.error
  if (!text) return <p className="job-none">{words.noError}</p>
  return <Code text={readError(text).text} label={words.rawError} />
}

function Prompt({ prompt, id }: { prompt: JobDetails["prompt"]; id: string }) {
  const [look, setLook] = useState<"tree" | "raw">("tree")
  const hasEditor = useQuery<SettingsAnswer>("/api/admin/settings", { freshSeconds: 600 }).data?.has_editor
  if (!prompt) return <p className="job-none">{words.noPrompt}</p>
  const text = JSON.stringify(prompt, null, 2)
  return (
    <>
      <div className="job-prompt-acts">
        <Choices
          label={words.look}
          hideLabel
          value={look}
          onChange={setLook}
          options={[
            { value: "tree", label: words.tree },
            { value: "raw", label: words.raw },
          ]}
        />
        <Button
          size="small"
          icon="download"
          onClick={() => saveFile(new Blob([text], { type: "application/json" }), `prompt-${id}.json`)}
        >
          {words.savePrompt}
        </Button>
        <Button
          size="small"
          icon="edit"
          offReason={hasEditor === false && words.noEditor}
          onClick={() => openInEditor(id)}
        >
          {words.openEditor}
        </Button>
      </div>
      {look === "tree" ? (
        <JsonTree value={prompt} openLevels={2} />
      ) : (
        <Code text={text} label={words.tabs.prompt} />
      )}
    </>
  )
}

/** Stores the job's id for the editor, which reads it when it starts, even if the user must log
 * in first. */
function openInEditor(id: string): void {
  // biome-ignore lint/suspicious/noDocumentCookie: other storage is cleared when another user logs in
  document.cookie = `comfyfleet_open_job=${id}; path=/editor/; max-age=600; samesite=strict`
  window.location.assign("/editor/")
}
