import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;

/** Java's own client sends Upgrade: h2c with its first request over http://, and a body (vllm issue 57203). */
class H2cUpgrade {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (String file : new String[] {args[1], args[2]}) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + "/v1/chat/completions"))
                .header("content-type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofByteArray(Files.readAllBytes(Path.of(file))))
                .build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version());
            System.out.print(answer.body());
            System.out.println("\0");
        }
    }
}
