//! What an error of the crate means, in words that hold no credentials and nothing of an answer's body but its code.

use std::error::Error as _;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

use super::super::client::Refusal;

/// Whether the object is not there, in a bucket that is.
pub(super) fn is_absent(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. }) && code(&error.to_string()) != Some("NoSuchBucket")
}

/// Why a request came to nothing. `shown` names the store.
pub(super) fn refusal(error: &Error, shown: &str) -> Refusal {
    // Never shown: it may quote what the server said.
    let text = error.to_string();
    let code = code(&text);
    let told = code.unwrap_or("no reason is told");
    if code == Some("NoSuchBucket") || matches!(error, Error::NotFound { .. }) {
        return Refusal::Denied(format!(
            "{shown}: there is no such bucket; make it, or change the URL"
        ));
    }
    match status(&text) {
        Some(401 | 403) => Refusal::Denied(format!(
            "{shown} does not let us ({told}); see which credentials the environment gives and what they permit"
        )),
        Some(status @ (301 | 302 | 307 | 308)) => Refusal::Denied(format!(
            "{shown} answers with {status} ({told}): the bucket is in another region; set region in the URL"
        )),
        Some(507) => Refusal::Full(format!("{shown} takes no more ({told})")),
        Some(status) if matches!(code, Some("QuotaExceeded" | "XMinioStorageFull")) => {
            Refusal::Full(format!("{shown} takes no more ({told}, {status})"))
        }
        Some(status @ 200..=299) => Refusal::Protocol(format!(
            "{shown} answers {status} with what is no answer ({told}); see what listens there"
        )),
        Some(status) => Refusal::Server(format!("{shown} answers with {status} ({told})")),
        None => without_status(error, &text, shown),
    }
}

fn without_status(error: &Error, text: &str, shown: &str) -> Refusal {
    match error {
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            return Refusal::Denied(format!("{shown} does not let us"));
        }
        _ if text.contains("without LOCATION") => {
            let words =
                "redirects to nowhere: the bucket is in another region; set region in the URL";
            return Refusal::Denied(format!("{shown} {words}"));
        }
        // Credentials are fetched from the machine's metadata where the environment has none.
        _ if text.contains("169.254.") || text.contains("metadata.google") => {
            let words = "the environment has no credentials, and neither has this machine";
            return Refusal::Denied(format!("{shown}: {words}"));
        }
        _ => {}
    }
    let mut cause = error.source();
    while let Some(each) = cause {
        if let Some(http) = each.downcast_ref::<HttpError>() {
            return match http.kind() {
                HttpErrorKind::Timeout => Refusal::Timeout,
                HttpErrorKind::Connect => {
                    Refusal::Unreachable(format!("{shown} cannot be connected to"))
                }
                HttpErrorKind::Decode => {
                    Refusal::Protocol(format!("{shown} answers with what is no HTTP"))
                }
                _ if innermost(each).contains("invalid HTTP") => {
                    Refusal::Protocol(format!("{shown} answers with what is no HTTP"))
                }
                _ => Refusal::Unreachable(format!("the connection to {shown} broke")),
            };
        }
        cause = each.source();
    }
    // An answer that came and could not be read.
    Refusal::Protocol(format!(
        "{shown} answers with what is not of its protocol; see what listens there"
    ))
}

fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string()
}

/// The status that a server answered with.
fn status(text: &str) -> Option<u16> {
    let at = text.find("status code: ")?;
    text[at + "status code: ".len()..].get(..3)?.parse().ok()
}

/// The code in an answer's body, if it is one word.
fn code(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let is_word = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_word.then_some(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(status: &str, body: &str) -> Error {
        Error::Generic {
            store: "S3",
            source: format!(
                "Error performing PUT http://h/b/x in 1ms - Server returned non-2xx status code: {status}: {body}"
            )
            .into(),
        }
    }

    #[test]
    fn each_answer_has_its_kind_and_no_body_is_quoted() {
        let body = "<Error><Code>SlowDown</Code><Message>AKIASECRET</Message></Error>";
        for (status, kind) in [
            ("500 Internal Server Error", "server"),
            ("503 Service Unavailable", "server"),
            ("404 Not Found", "server"),
            ("403 Forbidden", "denied"),
            ("401 Unauthorized", "denied"),
            ("301 Moved Permanently", "denied"),
            ("507 Insufficient Storage", "full"),
        ] {
            let refused = refusal(&answered(status, body), "s3://b/p");
            assert_eq!(refused.name(), kind, "{status}");
            let words = refused.to_string();
            assert!(!words.contains("AKIASECRET"), "{words}");
            assert!(words.contains("s3://b/p"), "{words}");
        }
        let words = refusal(&answered("503 Slow", body), "s3://b/p").to_string();
        assert!(words.contains("SlowDown"), "{words}");
        let not_a_word = "<Code>a b <script></Code>";
        let words = refusal(&answered("503 Slow", not_a_word), "s3://b/p").to_string();
        assert!(!words.contains("script"), "{words}");
    }

    #[test]
    fn a_bucket_that_is_not_there_is_no_missing_object() {
        let missing = |body: &str| Error::NotFound {
            path: "x".to_owned(),
            source: format!("status code: 404 Not Found: {body}").into(),
        };
        assert!(is_absent(&missing("<Code>NoSuchKey</Code>")));
        assert!(is_absent(&missing("")));
        let no_bucket = missing("<Code>NoSuchBucket</Code>");
        assert!(!is_absent(&no_bucket));
        assert_eq!(refusal(&no_bucket, "s3://b").name(), "denied");
    }
}
