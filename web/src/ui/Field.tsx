/** Input fields with labels. Label, hint and error are linked to the input for screen readers. */

import {
  type InputHTMLAttributes,
  type ReactNode,
  type Ref,
  type SelectHTMLAttributes,
  type TextareaHTMLAttributes,
  useId,
} from "react"
import { Icon, type IconName } from "./Icon"

interface Labelled {
  label: ReactNode
  /** True if only screen readers get the label, because its position makes the meaning clear. */
  hideLabel?: boolean
  hint?: ReactNode
  error?: ReactNode
  /** Shown at the right of the label. */
  aside?: ReactNode
}

interface Ids {
  id: string
  "aria-describedby": string | undefined
  "aria-invalid": true | undefined
}

/** The frame around an input of any kind. */
export function FieldFrame({
  label,
  hideLabel,
  hint,
  error,
  aside,
  children,
}: Labelled & { children: (ids: Ids) => ReactNode }) {
  const id = useId()
  const described = [error && `${id}-error`, hint && `${id}-hint`].filter(Boolean).join(" ")
  return (
    <div className="field">
      <div className={hideLabel ? "unseen" : "field-label"}>
        <label htmlFor={id}>{label}</label>
        {aside}
      </div>
      {children({ id, "aria-describedby": described || undefined, "aria-invalid": error ? true : undefined })}
      {error && (
        <p className="field-error" id={`${id}-error`}>
          {error}
        </p>
      )}
      {hint && (
        <p className="field-hint" id={`${id}-hint`}>
          {hint}
        </p>
      )}
    </div>
  )
}

type FieldProps = Labelled &
  Omit<InputHTMLAttributes<HTMLInputElement>, "id"> & {
    icon?: IconName
    ref?: Ref<HTMLInputElement>
    after?: ReactNode
  }

export function Field({ label, hideLabel, hint, error, aside, icon, after, className, ...rest }: FieldProps) {
  return (
    <FieldFrame label={label} hideLabel={hideLabel} hint={hint} error={error} aside={aside}>
      {(ids) => (
        <div className={`input${className ? ` ${className}` : ""}`}>
          {icon && <Icon name={icon} />}
          <input {...rest} {...ids} />
          {after}
        </div>
      )}
    </FieldFrame>
  )
}

type TextAreaProps = Labelled & Omit<TextareaHTMLAttributes<HTMLTextAreaElement>, "id">

export function TextArea({ label, hideLabel, hint, error, aside, ...rest }: TextAreaProps) {
  return (
    <FieldFrame label={label} hideLabel={hideLabel} hint={hint} error={error} aside={aside}>
      {(ids) => (
        <div className="input input-area">
          <textarea rows={3} {...rest} {...ids} />
        </div>
      )}
    </FieldFrame>
  )
}

export interface Option<V extends string = string> {
  value: V
  label: string
}

type SelectProps<V extends string> = Labelled &
  Omit<SelectHTMLAttributes<HTMLSelectElement>, "id" | "value" | "onChange"> & {
    options: readonly Option<V>[]
    value: V
    onChange: (value: V) => void
  }

/** The browser's native select, which every user knows. */
export function Select<V extends string>(props: SelectProps<V>) {
  const { label, hideLabel, hint, error, aside, options, value, onChange, ...rest } = props
  return (
    <FieldFrame label={label} hideLabel={hideLabel} hint={hint} error={error} aside={aside}>
      {(ids) => (
        <div className="input input-select">
          <select {...rest} {...ids} value={value} onChange={(event) => onChange(event.target.value as V)}>
            {options.map((option) => (
              <option key={option.value} value={option.value}>
                {option.label}
              </option>
            ))}
          </select>
          <Icon name="down" />
        </div>
      )}
    </FieldFrame>
  )
}

type CheckProps = Omit<InputHTMLAttributes<HTMLInputElement>, "type" | "id"> & {
  label: ReactNode
  hideLabel?: boolean
  /** True if only some of the items that the box stands for are selected. */
  mixed?: boolean
}

export function Check({ label, hideLabel, mixed, ...rest }: CheckProps) {
  const setMixed = (box: HTMLInputElement | null) => {
    if (box) box.indeterminate = Boolean(mixed)
  }
  return (
    <label className="check">
      <input type="checkbox" {...rest} ref={setMixed} />
      <span className={hideLabel ? "unseen" : undefined}>{label}</span>
    </label>
  )
}

interface ChoicesProps<V extends string> {
  label: string
  hideLabel?: boolean
  options: readonly Option<V>[]
  value: V
  onChange: (value: V) => void
}

/** Shows a few options next to each other, one of them selected. */
export function Choices<V extends string>({ label, hideLabel, options, value, onChange }: ChoicesProps<V>) {
  const name = useId()
  return (
    <fieldset className="field choices">
      <legend className={hideLabel ? "unseen" : undefined}>{label}</legend>
      <div className="segments">
        {options.map((option) => (
          <label key={option.value}>
            <input
              type="radio"
              name={name}
              value={option.value}
              checked={option.value === value}
              onChange={() => onChange(option.value)}
            />
            <span>{option.label}</span>
          </label>
        ))}
      </div>
    </fieldset>
  )
}

interface SliderProps extends Labelled {
  value: number
  min: number
  max: number
  step?: number
  onChange: (value: number) => void
}

/** A number within a range, set by slider or keyboard. */
export function Slider({ label, hint, error, value, min, max, step = 1, onChange }: SliderProps) {
  return (
    <FieldFrame label={label} hint={hint} error={error} aside={<output className="mono">{value}</output>}>
      {(ids) => (
        <input
          type="range"
          className="slider"
          {...ids}
          min={min}
          max={max}
          step={step}
          value={value}
          onChange={(event) => onChange(Number(event.target.value))}
        />
      )}
    </FieldFrame>
  )
}
